"""Every error that a user can cause: one line that says what to do, the right exit code, no start, no traceback."""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.fixtures.guard import StartRun
from tests.fixtures.proxy import Proxy
from tests.fixtures.server import PrivateServer, Server, Workshop, free_port
from tests.fixtures.waiting import until

MakeProxy = Callable[[tuple[str, int]], Proxy]
Refuse = Callable[..., tuple[int, str]]


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[str]:
    """Give a file that a command would make; it must not be there afterwards."""
    path = tmp_path / "started"
    yield str(path)
    assert not path.exists(), "the command was started"


@pytest.fixture
def refuse(start: StartRun, marker: str) -> Refuse:
    """Run a command line that must be refused; give its exit code and its one line."""

    def begin(*arguments: str, **how: Any) -> tuple[int, str]:
        ran = start("run", *arguments, "--", "touch", marker, **how)
        code = ran.code()
        assert ran.err.count("\n") == 1, ran.err
        assert ran.err.startswith("batchguard: ")
        return code, ran.err.removeprefix("batchguard: ").rstrip("\n")

    return begin


@pytest.mark.event("the run is refused")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--key", "100"],
            78,
            'key "100" is one number; write 100:ID, or bigint:100 for the other number space. Exit 78.',
        ),
        (
            ["--key", "1:99999999999"],
            78,
            r'key "1:99999999999": 99999999999 does not fit int4 .*\. Choose another. Exit 78.',
        ),
        (
            ["--key", "100:1", "--ttl", "30s"],
            78,
            r"unsafe timing: check-timeout 20 \(twice\) \+ kill-after 10 \+ 5 = 55s must be below ttl 30s: raise --ttl or lower another. Not started, exit 78.",
        ),
        (["--key", "100:1", "--kill-after", "0"], 78, r"kill-after 0 .* write --signal KILL. Not started, exit 78."),
        (["--key", "100:x"], 78, '"100:x" is not a key: write CATEGORY:ID in whole numbers .* Exit 78.'),
        ([], 64, "which lock[?] Give --key 100:1 .*"),
        (["--key", "100:1", "--nosuch"], 64, "No such option: --nosuch.* Try: batchguard run --help"),
        (["--key", "100:1", "--wait", "soon"], 64, '--wait: "soon" is not a duration; .*'),
        (["--key", "100:1", "-E", "300"], 64, "--skip-code: 300 is not an exit code from 0 to 255"),
        (
            ["--key", "100:1", "-c", "echo x"],
            64,
            "-c is not an option: the command is started without a shell. Write: -- sh -c 'echo x'",
        ),
        (
            ["--key", "100:1", "--local", "--dsn", "x"],
            64,
            "--dsn names one server and --local another; give one of them",
        ),
        (["--key", "job"], 78, '"job" is neither a key such as 100:1 nor a known name: there is no number table .*'),
        (
            ["--key", "100:1", "--config", "/no/such"],
            78,
            "cannot read /no/such: No such file or directory. Not started, exit 78.",
        ),
        (["--key", "100:1", "--dsn", "host=x nonsense"], 78, "the dsn does not read: .* Not started, exit 78."),
        (
            ["--key", "100:1", "--dsn", "service=nowhere"],
            78,
            'service "nowhere" is unknown, or sets nothing: .* Not started, exit 78.',
        ),
        (
            ["--key", "1:1..3", "--key", "1:2"],
            78,
            "1:2 and 1:1..3 both contain 1:2. .*|1:1..3 and 1:2 both contain 1:2. .*",
        ),
    ],
)
def test_command_line(refuse: Refuse, arguments: list[str], code: int, message: str) -> None:
    """What is wrong with the command line itself, before any database is asked."""
    got, said = refuse(*arguments)
    assert re.fullmatch(message, said), said
    assert got == code


@pytest.mark.parametrize("command", [[], ["--", ""]])
def test_nothing_to_run(start: StartRun, command: list[str]) -> None:
    """Without a command: usage."""
    ran = start("run", "--key", "100:1", *command)
    assert ran.code() == 64
    assert ran.err == "batchguard: no command: write batchguard run --key 100:1 -- COMMAND [ARG]...\n"


def test_no_database_named(start: StartRun) -> None:
    """Under cron the shell's exports are gone: the line says that no database was named."""
    ran = start("run", "--key", "100:1", "--", "true", env={"BATCHGUARD_DSN": ""})
    assert ran.code() == 69
    assert "No database was named: --dsn, BATCHGUARD_DSN, or dsn in /etc/batchguard.toml." in ran.err


def test_bare_command_is_help(start: StartRun) -> None:
    """`batchguard` alone prints its help as it is, and fails."""
    bare = start()
    assert bare.code() == 64
    assert bare.err.startswith("Usage: ")
    assert "Try:" not in bare.err


@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        (
            "[defaults]\nskipcode = 1\n",
            "1:1",
            r'%s:2: unknown setting "skipcode" in \[defaults\]; did you mean skip_code\? Exit 78.',
        ),
        ('[keys]\na = "1:1"\nb = "1:1"\n', "a", r"%s:3: 1:1 is given to a \(line 2\) and to b. .* Exit 78."),
        (
            '[retired]\nold = "1:1"\n',
            "1:1",
            r"1:1 is retired \(old, %s:2\); numbers are never given again. Choose another. Exit 78.",
        ),
        (
            '[keys]\ndaily_sales = "1:1"\n',
            "daily_sale",
            r'"daily_sale" is not in %s. Did you mean daily_sales\? Otherwise add it under \[keys\] with a number never used. Exit 78.',
        ),
        ("[keys\n", "1:1", r"%s is not valid TOML: .* Not started, exit 78."),
        ('[keys]\na = { key = "1:1", kill_after = "5s" }\n', "a", None),
    ],
)
def test_number_table(refuse: Refuse, tmp_path: Path, table: str, key: str, message: str | None) -> None:
    """What is wrong with the number table: file, line, what to do."""
    file = tmp_path / "table.toml"
    file.write_text(table)
    options = ["--config", str(file), "--key", key]
    if message is None:
        options += ["--kill-after", "8s"]
        message = r"--kill-after 8 against 5 in the number table: a command line may only shorten it, .* Not started, exit 78."
    got, said = refuse(*options)
    assert re.fullmatch(message.replace("%s", re.escape(str(file))), said), said
    assert got == 78


@pytest.mark.event("the run is refused")
def test_unreachable(refuse: Refuse) -> None:
    """Nobody listens: 69, and how to go on."""
    port = free_port()
    code, said = refuse("--key", "100:1", dsn=f"host=127.0.0.1 port={port} user=x dbname=x")
    assert code == 69
    assert said == (
        f"cannot reach 127.0.0.1:{port} (connection refused): 100:1 was not run, exit 69. "
        "To keep trying: --connect-retry 5m. Trying it out? --local"
    )


def test_unreachable_by_name(refuse: Refuse) -> None:
    """A host name that does not exist: 69, and it says so."""
    code, said = refuse("--key", "100:1", dsn="host=no-such-host.invalid user=x dbname=x")
    assert code == 69
    assert re.match(r"cannot reach no-such-host.invalid:5432 \(.*resolve.*\): 100:1 was not run", said), said


def test_server_that_never_answers(refuse: Refuse) -> None:
    """A host that accepts and says nothing: 69 after --connect-timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        code, said = refuse(
            "--key", "100:1", "--connect-timeout", "0.5", dsn=f"host=127.0.0.1 port={port} user=x dbname=x"
        )
    assert code == 69
    assert "(no answer within 0.5s)" in said


def test_connect_retry(start: StartRun, server: Server) -> None:
    """--connect-retry waits for a server that comes up later."""
    host, target = server.host_and_port
    port = free_port()
    ran = start(
        "run", "--key", "100:1", "--connect-retry", "30", "--", "true", dsn=f"{server.dsn} host=127.0.0.1 port={port}"
    )
    assert ran.popen.poll() is None
    proxy = Proxy((host, target), port)
    try:
        until(lambda: ran.popen.poll() is not None)
        assert ran.code() == 0
    finally:
        proxy.close()


@pytest.mark.event("the run is refused")
def test_wrong_password(refuse: Refuse, private_server: PrivateServer) -> None:
    """A wrong password: 77, and where passwords come from."""
    private_server.sql("CREATE ROLE locked LOGIN PASSWORD 'right'")
    hba = private_server.embedded.data / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text("host all locked all scram-sha-256\n" + before)
    private_server.sql("SELECT pg_reload_conf()")
    try:
        for password in ("password=wrong", ""):
            code, said = refuse("--key", "100:1", dsn=f"{private_server.dsn} user=locked {password}")
            assert code == 77
            assert re.fullmatch(
                r"127.0.0.1:\d+ refused the login \(.*password.*\): 100:1 was not run, exit 77. Check user and password: "
                r"~/.pgpass, the service file, or PGUSER and PGPASSWORD.",
                said,
            ), said
    finally:
        hba.write_text(before)
        private_server.sql("SELECT pg_reload_conf()")
        private_server.sql("DROP ROLE locked")


def test_no_such_database(refuse: Refuse, server: Server) -> None:
    """A database that does not exist: 78, and what to correct."""
    code, said = refuse("--key", "100:1", dsn=f"{server.dsn} dbname=no_such_db")
    assert code == 78
    assert "no_such_db" in said
    assert said.endswith("100:1 was not run, exit 78. Correct dbname in the dsn.")


@pytest.mark.event("the run is refused")
def test_role_without_the_right(refuse: Refuse, server: Server, role: str) -> None:
    """A role that may not call a lock function: 77, with the GRANT that a DBA runs."""
    function = "pg_try_advisory_lock(int, int)"
    server.sql(f"REVOKE EXECUTE ON FUNCTION pg_catalog.{function} FROM PUBLIC")
    try:
        code, said = refuse("--key", "100:1", dsn=f"{server.dsn} user={role} password=right")
    finally:
        server.sql(f"GRANT EXECUTE ON FUNCTION pg_catalog.{function} TO PUBLIC")
    assert code == 77
    assert re.fullmatch(
        rf'role "{role}" may not execute pg_try_advisory_lock\(int, int\) in "\w+" on [\w.]+:\d+. '
        rf"Ask a DBA: GRANT EXECUTE ON FUNCTION pg_try_advisory_lock\(int, int\) TO {role}; Not started, exit 77.",
        said,
    ), said


def test_retrying_uses_up_nothing(start: StartRun) -> None:
    """Hundreds of attempts to connect need no more descriptors than one."""
    dsn = f"host=localhost port={free_port()} user=x dbname=x"
    retrying = start("run", "--key", "100:1", "--connect-retry", "4", "--", "true", dsn=dsn)
    until(lambda: len(os.listdir(f"/proc/{retrying.keeper}/fd")) > 5)
    counts = set()
    while retrying.popen.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            counts.add(len(os.listdir(f"/proc/{retrying.keeper}/fd")))
        time.sleep(0.05)
    assert retrying.code() == 69
    assert max(counts) < 20


def test_server_that_falls_silent_after_the_login(start: StartRun, server: Server, make_proxy: MakeProxy) -> None:
    """A server that accepts and then says nothing more: 69, not a fault of ours."""
    proxy = make_proxy(server.host_and_port)
    proxy.freeze_after_login()
    ran = start(
        "run",
        "--key",
        "100:1",
        "--check-timeout",
        "1",
        "--",
        "true",
        dsn=f"{server.dsn} host=127.0.0.1 port={proxy.port}",
    )
    assert ran.code() == 69
    assert "(no answer within 1s)" in ran.err


def test_right_that_is_not_a_lock_function(refuse: Refuse, server: Server, role: str) -> None:
    """Any other right that is missing: 77, in the server's words."""
    server.sql("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
    try:
        code, said = refuse("--key", "100:1", dsn=f"{server.dsn} user={role} password=right")
    finally:
        server.sql("GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC")
    assert code == 77
    assert "pg_control_system (42501). Ask a DBA to grant it. Not started, exit 77." in said


def test_errors_as_json(start: StartRun) -> None:
    """--log-format json holds for errors too."""
    ran = start("run", "--key", "100:1", "--log-format", "json", "--", "true", dsn=f"host=127.0.0.1 port={free_port()}")
    assert ran.code() == 69
    assert json.loads(ran.err)["exit_code"] == 69


def test_full_lock_table(start: StartRun, workshop: Workshop, marker: str) -> None:
    """A server without room for another lock: 69, and which setting to raise."""
    small = workshop.build(
        max_locks_per_transaction="10", max_connections="10", max_worker_processes="2", max_wal_senders="0"
    )
    with small.connect() as psql:
        fill = "SELECT count(pg_advisory_lock(8, n)) FROM generate_series(1, 100000) AS n"
        with pytest.raises(psycopg.errors.OutOfMemory):
            psql.execute(fill)
        ran = start("run", "--settle", "off", "--key", "100:1", "--", "touch", marker, dsn=small.dsn)
        assert ran.code() == 69
        assert "no room in the lock table" in ran.err
        assert "max_locks_per_transaction" in ran.err
    small.stop("fast")


def test_no_traceback_but_the_message_for_a_closed_stderr(start: StartRun) -> None:
    """With stderr closed the exit code still says it."""
    ran = start("run", "--key", "100", "--", "true", stderr=None, preexec_fn=lambda: os.close(2))
    assert ran.code() == 78
