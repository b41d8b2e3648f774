"""`batchguard doctor`, against what can be wrong."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from batchguard.core.job_settings import JobSettings
from batchguard.core.queue_diagnosis import QueueFacts, diagnose_queue
from batchguard.runtime.queue_doctor import QueueDoctor
from tests.fixtures.cluster import Cluster
from tests.fixtures.guard import StartRun
from tests.fixtures.pooler import MakePooler
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.queue import Queue
from tests.fixtures.server import Server, Workshop

FIELDS = ["id", "level", "subject", "message", "fix", "value"]
Doctor = Callable[..., tuple[int, dict[str, dict[str, Any]]]]


@pytest.fixture
def doctor(start: StartRun) -> Doctor:
    """Run doctor; give its exit code and its findings by their id; there is never anything else on stderr."""

    def examine(*arguments: str, **how: Any) -> tuple[int, dict[str, dict[str, Any]]]:
        shown = start("doctor", "--json", *arguments, **how)
        code = shown.code()
        assert shown.err == ""
        findings = [json.loads(line) for line in shown.out.splitlines()]
        assert all(list(finding) == FIELDS for finding in findings)
        assert all(finding["fix"] for finding in findings if finding["level"] != "ok")
        assert code == any(finding["level"] in ("warning", "error") for finding in findings)
        return code, {finding["id"]: finding for finding in findings}

    return examine


def levels(findings: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Give what is not ok."""
    return {name: finding["level"] for name, finding in findings.items() if finding["level"] != "ok"}


def test_healthy_server(doctor: Doctor, table: str) -> None:
    """All is right: exit 0, and what was looked at is listed."""
    code, findings = doctor("--config", table)
    assert code == 0
    assert levels(findings) == {}
    assert set(findings) == {
        "proc", "config", "timing", "database", "primary", "pooler", "lock_functions", "pg_monitor",
        "pg_signal_backend", "keepalive", "role_default", "clock",
    }  # fmt: skip
    assert findings["timing"]["message"] == "check-timeout 1 (twice) + kill-after 0.5 + 5 = 7.5s, below ttl 8s"
    assert findings["keepalive"]["value"] == "8"


@pytest.fixture
def queue(server: Server, plain_jobs: Queue, tmp_path: Path) -> tuple[Queue, str]:
    """Give a queue, and a config file that names its schema."""
    file = tmp_path / "queue.toml"
    file.write_text(f'[jobs]\nschema = "{plain_jobs.schema}"\n')
    return plain_jobs, str(file)


def test_healthy_queue(doctor: Doctor, queue: tuple[Queue, str]) -> None:
    """Its version, and that nothing is forgotten."""
    code, findings = doctor("--config", queue[1])
    assert code == 0
    assert findings["queue"]["value"] == "1"
    assert findings["queue_leases"]["level"] == "ok"


def test_sick_queue(doctor: Doctor, queue: tuple[Queue, str]) -> None:
    """Old snapshots, dead rows, indexes that are not valid, autovacuum off, forgotten leases: each is a finding."""
    jobs, config = queue
    jobs.put(1, 2, 3)
    jobs.claim("-n", "2")
    jobs.sql("UPDATE {jobs} SET claimed_until = now() - interval '1 hour' WHERE status = 'running'")
    jobs.sql("ALTER TABLE {jobs} SET (autovacuum_enabled = off)")
    jobs.put(1, 2, queue="twice")
    with pytest.raises(psycopg.errors.UniqueViolation):
        jobs.sql("CREATE UNIQUE INDEX CONCURRENTLY broken ON {jobs} (queue) WHERE queue = 'twice'")
    _, findings = doctor("--config", config)
    assert levels(findings) == {"queue_autovacuum": "warning", "queue_index": "error", "queue_leases": "warning"}
    assert "broken" in findings["queue_index"]["message"]
    assert findings["queue_leases"]["value"] == "2"


def test_judgement_of_a_queue() -> None:
    """What takes long to cause: an hour's snapshot, a hundred thousand dead rows; and each version that is not ours."""
    sick = QueueFacts(
        "queue",
        1,
        1,
        dead_rows=100_001,
        snapshot_age=3600.0,
        snapshot_of="backend 7",
        snapshot_end="SELECT pg_terminate_backend(7)",
    )
    findings = {finding.id: finding for finding in diagnose_queue(sick)}
    assert findings["queue_dead_rows"].level == findings["queue_snapshot"].level == "warning"
    assert "backend 7" in findings["queue_snapshot"].subject
    assert "1h" in findings["queue_snapshot"].message
    assert next(iter(diagnose_queue(QueueFacts("queue", 2, 1)))).fix == "install the batchguard that made it"
    assert next(iter(diagnose_queue(QueueFacts("queue", 1, 2)))).fix == "batchguard jobs migrate"


def test_oldest_snapshot_is_found(plain_jobs: Queue) -> None:
    """Who keeps it, since when, and what would end it, as the server says it."""
    doctor = QueueDoctor(plain_jobs.dsn, JobSettings(schema=plain_jobs.schema), "doctor", check_version=False)
    with plain_jobs.server.connect(application_name="psql") as other, other.transaction():
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        pid = other.execute("SELECT pg_backend_pid()").fetchone()
        with contextlib.closing(doctor):
            facts = doctor.persist(doctor.gather)
    assert pid is not None
    assert facts is not None
    assert facts.snapshot_of == f'backend {pid[0]} of postgres, "psql"'
    assert facts.snapshot_end == f"SELECT pg_terminate_backend({pid[0]})"
    assert 0 <= (facts.snapshot_age or -1) < 60


def test_queue_that_is_missing_or_hidden(
    doctor: Doctor, queue: tuple[Queue, str], jobs_role: str, tmp_path: Path
) -> None:
    """Spoken of in the config and not there; there, and not for this role."""
    _, findings = doctor("--config", queue[1], dsn=jobs_role)
    assert findings["queue_leases"]["level"] == "note"
    file = tmp_path / "missing.toml"
    file.write_text('[jobs]\nschema = "nowhere"\n')
    _, findings = doctor("--config", str(file))
    assert findings["queue"]["fix"] == "batchguard jobs migrate"


def test_text(start: StartRun, table: str, server: Server) -> None:
    """People get one line for each finding."""
    shown = start("doctor", "--config", table)
    assert shown.code() == 0
    lines = shown.out.splitlines()
    assert lines[0] == "# batchguard doctor"
    assert all(line.startswith("ok  ") for line in lines[1:])
    assert server.locks() == []


def test_standby(doctor: Doctor, make_cluster: Callable[..., Cluster]) -> None:
    """A standby alone is an error; named beside its primary it is none."""
    cluster = make_cluster()
    code, findings = doctor(dsn=cluster.standby.dsn)
    assert code == 1
    assert levels(findings) == {"primary": "error"}
    assert "list all hosts" in findings["primary"]["fix"]
    assert doctor(dsn=cluster.dsn)[0] == 0


def test_no_synchronous_standby(doctor: Doctor, make_cluster: Callable[..., Cluster]) -> None:
    """Commits that would wait for ever are seen before the first run does."""
    cluster = make_cluster()
    cluster.replicate_synchronously()
    assert doctor(dsn=cluster.primary.dsn)[0] == 0
    cluster.standby.stop("fast")
    _, findings = doctor(dsn=cluster.primary.dsn)
    assert levels(findings) == {"synchronous_standby": "error"}


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_pooler(doctor: Doctor, make_pooler: MakePooler, server: Server, tmp_path: Path, mode: str) -> None:
    """A pooler is an error, and a warning where the operator vouches for it; nothing is left in its sessions."""
    pooled = make_pooler(mode)
    code, findings = doctor(dsn=pooled.dsn)
    assert code == 1
    assert levels(findings) == {"pooler": "error"}
    file = tmp_path / "c.toml"
    file.write_text("[defaults]\nallow_pooler = true\n")
    _, findings = doctor("--config", str(file), dsn=pooled.dsn)
    assert levels(findings) == {"pooler": "warning"}
    assert pooled.sql("SHOW search_path") == [('"$user", public',)]


def test_role_without_rights(doctor: Doctor, server: Server, role: str) -> None:
    """Every function that may not be called is in the GRANT; what would be of use is a note."""
    server.sql(
        "REVOKE EXECUTE ON FUNCTION pg_try_advisory_lock(int, int), pg_advisory_unlock_shared(bigint) FROM public"
    )
    try:
        _, findings = doctor(dsn=make_conninfo(server.dsn, user=role, password="right"))
        assert levels(findings) == {"lock_functions": "error", "pg_monitor": "note", "pg_signal_backend": "note"}
        fix = findings["lock_functions"]["fix"]
        assert fix.endswith(f" TO {role};")
        server.sql(fix)
        server.sql(findings["pg_monitor"]["fix"])
        server.sql(findings["pg_signal_backend"]["fix"])
        code, findings = doctor(dsn=make_conninfo(server.dsn, user=role, password="right"))
        assert (code, levels(findings)) == (0, {})
    finally:
        server.sql(
            "GRANT EXECUTE ON FUNCTION pg_try_advisory_lock(int, int), pg_advisory_unlock_shared(bigint) TO public"
        )


def test_unix_socket(doctor: Doctor, workshop: Workshop) -> None:
    """No keepalives there: a note that says what that means."""
    server = workshop.build()
    code, findings = doctor(dsn=server.embedded.dsn)
    server.stop("immediate")
    assert code == 0
    assert levels(findings) == {"keepalive": "note"}


def test_unsafe_timing(doctor: Doctor, tmp_path: Path) -> None:
    """The sum is in the line, with the line of the file; a safe one beside it is shown too."""
    file = tmp_path / "c.toml"
    file.write_text('[keys]\nslow = { key = "100:1", check_timeout = "1m" }\nlong = { key = "100:2", ttl = "2m" }\n')
    code, findings = doctor("--config", str(file))
    assert code == 1
    assert levels(findings) == {"number_table": "error"}
    assert findings["number_table"]["subject"] == f"{file}:2"
    assert (
        "slow: unsafe timing: check-timeout 60 (twice) + kill-after 10 + 5 = 135s"
        in findings["number_table"]["message"]
    )
    assert findings["timing"]["subject"] == "timing of long"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[keys\n", "is not valid TOML"),
        ("\xff", "is not UTF-8"),
        ("[defaults]\nskipcode = 1\n", 'unknown setting "skipcode" in [defaults]; did you mean skip_code?'),
        ('[keys]\na = "1:1"\nb = "1:1"\n', "1:1 is given to a (line 2) and to b"),
    ],
)
def test_broken_config(doctor: Doctor, tmp_path: Path, text: str, message: str) -> None:
    """What is wrong with the file, and the rest is looked at all the same."""
    file = tmp_path / "c.toml"
    file.write_bytes(text.encode("latin-1"))
    code, findings = doctor("--config", str(file))
    assert code == 1
    found = findings.get("number_table", findings["config"])
    assert found["level"] == "error"
    assert message in found["message"]
    assert findings["primary"]["level"] == "ok"


def test_file_that_is_not_there(doctor: Doctor) -> None:
    """A named file must be there."""
    _, findings = doctor("--config", "/nonexistent.toml")
    assert "cannot read /nonexistent.toml" in findings["config"]["message"]


def test_password_for_everybody(doctor: Doctor, server: Server, tmp_path: Path) -> None:
    """A password in a file that all may read."""
    file = tmp_path / "c.toml"
    file.write_text(f'dsn = "{make_conninfo(server.dsn, password="secret")}"\n')
    file.chmod(0o644)
    _, findings = doctor("--config", str(file))
    assert levels(findings) == {"password": "warning"}
    file.chmod(0o640)
    assert levels(doctor("--config", str(file))[1]) == {}


def test_log_file_that_cannot_be_written(doctor: Doctor, tmp_path: Path) -> None:
    """A folder that is not there would cost a line of mail with every run."""
    file = tmp_path / "c.toml"
    file.write_text('[defaults]\nlog_file = "/nonexistent/log"\n')
    assert levels(doctor("--config", str(file))[1]) == {"file": "warning"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("statement_timeout", "1s"),
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_read_only", "on"),
        ("idle_session_timeout", "1min"),
        ("synchronous_commit", "off"),
    ],
)
def test_role_defaults(doctor: Doctor, server: Server, role: str, setting: str, value: str) -> None:
    """Each default that would bite a batch, with what takes it back."""
    server.sql(f"GRANT pg_monitor, pg_signal_backend TO {role}")
    server.sql(f"ALTER ROLE {role} SET {setting} = '{value}'")
    code, findings = doctor(dsn=make_conninfo(server.dsn, user=role, password="right"))
    assert code == 1
    assert levels(findings) == {"role_default": "warning"}
    found = findings["role_default"]
    assert (found["subject"], found["value"]) == (setting, value)
    server.sql(found["fix"].partition(";")[0])
    assert doctor(dsn=make_conninfo(server.dsn, user=role, password="right"))[0] == 0


@pytest.mark.parametrize(
    ("dsn", "message", "fix"),
    [
        ("host=127.0.0.1 port=1", "connection refused", "is the server up"),
        ("host=nowhere.invalid", "", "is the server up"),
        ("host=", "", ""),
        ("nonsense", "the dsn does not read", "correct it"),
        ("service=nowhere", 'service "nowhere" is unknown', "correct it"),
    ],
)
def test_no_server(doctor: Doctor, dsn: str, message: str, fix: str) -> None:
    """Why it cannot be reached, and what to do."""
    code, findings = doctor("--dsn", dsn)
    assert code == 1
    assert findings["connection"]["level"] == "error"
    assert message in findings["connection"]["message"]
    assert fix in findings["connection"]["fix"]


def test_nobody_named_a_database(doctor: Doctor) -> None:
    """Where a database can be named."""
    _, findings = doctor(env={"BATCHGUARD_DSN": "", "PGHOST": "/nonexistent"})
    assert "name a database: --dsn, BATCHGUARD_DSN" in findings["connection"]["fix"]


def test_login_and_database(doctor: Doctor, server: Server) -> None:
    """A database or a role that is not there."""
    _, findings = doctor(dsn=make_conninfo(server.dsn, dbname="nowhere"))
    assert findings["connection"]["fix"] == "correct dbname in the dsn"
    _, findings = doctor(dsn=make_conninfo(server.dsn, user="nobody_at_all", password="x"))
    assert findings["connection"]["level"] == "error"


@pytest.mark.slow
def test_silent_server(doctor: Doctor, server: Server, make_proxy: MakeProxy) -> None:
    """A server that takes the connection and says nothing more."""
    proxy = make_proxy(server.host_and_port)
    proxy.freeze_after_login()
    code, findings = doctor(dsn=make_conninfo(server.dsn, host=proxy.host, port=proxy.port))
    assert code == 1
    assert "no answer within 10s" in findings["connection"]["message"]


def test_as_cron(doctor: Doctor, start: StartRun, server: Server, tmp_path: Path) -> None:
    """What your shell exports is not there under cron: the database must be named in the file, and the path written."""
    code, findings = doctor("--as-cron")
    assert code == 1
    assert findings["connection"]["level"] == "error"
    assert findings["cron_path"]["value"] == "/usr/bin:/bin"
    file = tmp_path / "c.toml"
    file.write_text(f'dsn = "{server.dsn}"\n')
    file.chmod(0o640)
    _, findings = doctor("--as-cron", "--config", str(file))
    assert findings["primary"]["level"] == "ok"
    shown = start("doctor", "--as-cron", "--dsn", server.dsn)
    shown.code()
    assert shown.out.startswith("# batchguard doctor, in cron's environment\n")
    assert os.path.isabs(findings["cron_path"]["fix"].split()[1])


def test_usage(start: StartRun) -> None:
    """Two servers cannot be meant."""
    assert start("doctor", "--dsn", "x", "--local").code() == 64
