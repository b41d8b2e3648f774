"""`batchguard doctor`: gathers what core judges, and goes on after whatever does not answer."""

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from batchguard.adapters import lock_session, process_tree
from batchguard.adapters.clock import wall_time
from batchguard.adapters.config_file import candidate_files, load_table
from batchguard.adapters.postgres import (
    ConnectFailedError,
    Conversation,
    FailedAttempt,
    SessionEndedError,
    StatementError,
    TimedOutError,
    connect,
    drive,
)
from batchguard.core.diagnosis import (
    DEFAULTS_THAT_BITE,
    Diagnosis,
    ServerFacts,
    Setting,
    diagnose_server,
    diagnose_timing,
)
from batchguard.core.errors import BatchguardError
from batchguard.core.keys import bigint, pair
from batchguard.core.number_table import NumberTable, lint_forms
from batchguard.core.settings import RunSettings
from batchguard.core.timing import is_safe
from batchguard.runtime.access import LOOK, QUERIES, database_text
from batchguard.runtime.connection import PATIENCE, sleep
from batchguard.runtime.inspect import Observer

_FUNCTIONS = [
    function
    for shared in (False, True)
    for function in lock_session.lock_functions([pair(0, 0), bigint(0)], shared, waits=True)
]


@dataclass(frozen=True)
class Named:
    """Where the database was named, in words, and its DSN."""

    source: str
    dsn: str


def examine_host(*, in_cron: bool, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Look at this host: whether a process tree can be followed, and, in cron's environment, whether it finds us."""
    if process_tree.is_visible():
        yield Diagnosis("proc", "ok", "/proc", "shows a process's children: a batch can be killed as a whole")
    else:
        yield Diagnosis(
            "proc",
            "error",
            "/proc",
            "does not show the children of a process, so that a batch could not be killed as a whole",
            "mount /proc; the kernel needs CONFIG_PROC_CHILDREN",
        )
    if in_cron:
        path = environ.get("PATH", "")
        if found := shutil.which("batchguard", path=path):
            yield Diagnosis("cron_path", "ok", "cron's PATH", f"finds {found}", value=path)
        else:
            script = Path(sys.executable).with_name("batchguard")
            yield Diagnosis(
                "cron_path",
                "note",
                "cron's PATH",
                f"is {path}, where there is no batchguard",
                f"write {script} in the crontab, or link it: ln -s {script} /usr/local/bin/, with PATH= in the crontab",
                path,
            )


def examine_config(named: str | None, environ: Mapping[str, str]) -> tuple[NumberTable, list[Diagnosis]]:
    """Read the config file that counts, and list all that is wrong with it; an empty table where it does not read."""
    try:
        table = load_table(named, environ)
    except BatchguardError as error:
        text = str(error).removesuffix(" Not started, exit 78.")
        return NumberTable(), [Diagnosis("config", "error", "config file", text, "every run that reads it is refused")]
    if table.file is None:
        searched = ", ".join(str(path) for path in candidate_files(named, environ))
        return table, [Diagnosis("config", "ok", "config file", f"there is none (looked for {searched})")]
    found = [Diagnosis("config", "ok", table.file, f"{len(table.entries)} keys", value=table.file)]
    for level, findings in (("error", table.findings), ("warning", lint_forms(table))):
        found += [
            Diagnosis(
                "number_table",
                level,  # type: ignore[arg-type]  # mypy widens the literal in a loop
                f"{table.file}:{finding.line}",
                finding.message.removesuffix("."),
                "correct it; every run that reads it is refused" if level == "error" else "batchguard keys lint",
            )
            for finding in findings
        ]
    if table.dsn and _has_password(table.dsn) and os.stat(table.file).st_mode & stat.S_IROTH:
        found.append(
            Diagnosis(
                "password",
                "warning",
                table.file,
                "has a password in its dsn, and everybody may read it",
                "put it into ~/.pgpass or a service file, mode 0600",
            )
        )
    return table, found


def _has_password(dsn: str) -> bool:
    try:
        return "password" in conninfo_to_dict(dsn)
    except Exception:
        return False


def examine_settings(table: NumberTable) -> Iterator[Diagnosis]:
    """Show the timing that runs will have, and look for files that they could not write."""
    common = RunSettings(**table.defaults)
    if is_safe(common.timing):
        yield diagnose_timing("by default", common.timing)
    named = {name: RunSettings(**{**table.defaults, **entry.settings}) for name, entry in table.entries.items()}
    for name, settings in named.items():
        if settings.timing != common.timing and is_safe(settings.timing):
            yield diagnose_timing(f"of {name}", settings.timing)
    wanted = {file for settings in [common, *named.values()] for file in (settings.log_file, settings.status_file)}
    for file in sorted(file for file in wanted if file):
        folder = os.path.dirname(os.path.abspath(file))
        if not os.access(file if os.path.exists(file) else folder, os.W_OK):
            yield Diagnosis(
                "file",
                "warning",
                file,
                "cannot be written by this account",
                f"make {folder} with the right owner, or name another file",
            )


def examine_server(named: Named, settings: RunSettings) -> list[Diagnosis]:
    """Reach the database, and judge it."""
    try:
        doctor = _Doctor(named, settings)
    except BatchguardError as error:
        text = str(error).removesuffix(" Not started, exit 78.")
        return [Diagnosis("connection", "error", named.source, text, "correct it")]
    try:
        return doctor.examine()
    finally:
        doctor.close()


class _Doctor(Observer):
    def __init__(self, named: Named, settings: RunSettings) -> None:
        super().__init__(named.dsn, "doctor")
        self.named = named
        self.checked = settings

    def examine(self) -> list[Diagnosis]:
        try:
            facts = drive(self.gather(), sleep)
        except ConnectFailedError as error:
            return [self.unreachable(attempt) for attempt in error.attempts]
        except TimedOutError:
            why = f"no answer within {PATIENCE:g}s"
        except SessionEndedError as error:
            why = f"the server ended the session, {error.reason}"
        except StatementError as error:
            why = f"{error.sqlstate}, {error.message}"
        else:
            return list(diagnose_server(facts, self.checked.timing, allow_pooler=self.checked.allow_pooler))
        return [Diagnosis("connection", "error", self.subject.host, why, "try again; look into the server's log")]

    def unreachable(self, attempt: FailedAttempt) -> Diagnosis:
        """Say why one address does not do, and what to do about it."""
        if attempt.standby:
            message, fix = (
                "is a standby, and its locks exclude nobody",
                "list all hosts in the dsn, or name the primary",
            )
            return Diagnosis("primary", "error", attempt.host, message, fix)
        fix = "is the server up, are host and port right, does a firewall stand in between?"
        sqlstate = attempt.sqlstate or ""
        if not self.named.dsn:
            fix = "name a database: --dsn, BATCHGUARD_DSN, or dsn in /etc/batchguard.toml; to try it out: --local"
        elif attempt.needs_password or sqlstate.startswith("28"):
            fix = "check user and password: ~/.pgpass, the service file, or the server's pg_hba.conf"
        elif sqlstate == "3D000":
            fix = "correct dbname in the dsn"
        elif sqlstate == "53300":
            fix = (
                "raise max_connections, or see who uses them: SELECT usename, count(*) FROM pg_stat_activity GROUP BY 1"
            )
        where = f"{attempt.host} ({self.named.source})"
        return Diagnosis("connection", "error", where, attempt.why, fix, sqlstate or None)

    def gather(self) -> Conversation[ServerFacts]:
        self.session = yield from connect(self.params, PATIENCE)
        self.is_connected = True
        # The defaults first: the next statements change what they show.
        defaults = yield from self.ask(LOOK["defaults"], [DEFAULTS_THAT_BITE])
        yield from self.prepared()
        asked_at = wall_time().timestamp()
        rows = yield from self.ask(LOOK["diagnose"], [_FUNCTIONS])
        took = wall_time().timestamp() - asked_at
        yield from self.ask(LOOK["end_look"])
        role, quoted, system_id, version, primary, pid, lacking, *more = rows[0]
        monitor, signal_right, socket, clock, names, count = more
        database = self.session.pgconn.db.decode("utf-8", "replace")
        facts = ServerFacts(
            place=database_text(database, self.session.params),
            role=role or "",
            quoted_role=quoted or "",
            system_id=system_id or "",
            version=(version or "").split(" ")[0],
            is_primary=primary == "t",
            same_backend=self.session.pgconn.backend_pid == int(pid or 0),
            lacking_functions=json.loads(lacking or "[]"),
            has_monitor=monitor == "t",
            has_signal=signal_right == "t",
            over_socket=socket == "t",
            clock_ahead_s=asked_at + took / 2 - float(clock or 0),
            defaults={name or "": Setting(value or "", source or "") for name, value, source in defaults},
            synchronous_names=names or "",
            synchronous_standbys=int(count or 0),
        )
        if not facts.same_backend:
            return facts  # what is set in a pooled session may stay there
        yield from self.ask(QUERIES["prepare_session"], lock_session.keepalive_settings(self.checked.ttl))
        rows = yield from self.ask(LOOK["keepalive"])
        user_timeout, probes = rows[0]
        probes_ttl = float(probes or 0) or None
        return replace(facts, server_ttl=lock_session.seconds_of(user_timeout), probes_ttl=probes_ttl)
