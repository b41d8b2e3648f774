"""`batchguard status`, with psql as the other party."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.fixtures.guard import COMMAND, StartRun, clean_environment
from tests.fixtures.pooler import MakePooler
from tests.fixtures.server import PrivateServer, Server, Workshop
from tests.fixtures.terminal import Terminal
from tests.fixtures.waiting import until

FIELDS = [
    "database",
    "server",
    "key",
    "kind",
    "name",
    "mode",
    "state",
    "by",
    "pid",
    "user",
    "application",
    "host",
    "since",
    "run_id",
    "reason",
    "until",
    "window_s",
    "hidden",
]


@pytest.fixture
def status(start: StartRun) -> Any:
    """Run status; give its exit code and what it shows: lines, or with --json objects."""

    def look(*arguments: str, **how: Any) -> tuple[int, list[Any]]:
        shown = start("status", *arguments, **how)
        lines = shown.out.splitlines()
        code = shown.code()
        assert code in (0, 1), shown.err
        return code, [json.loads(line) for line in lines] if "--json" in arguments else lines

    return look


@pytest.fixture
def strangers(server: Server, role: str) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    """Take locks of every kind with psql's means: from another role, from another database, and one that waits."""
    [(name,)] = server.sql("SELECT current_database()")
    server.sql(f'CREATE DATABASE "{name}_other"')
    other_role = server.connect(application_name="psql", user=role, password="right")
    other_database = server.connect(application_name="psql", dbname=f"{name}_other")
    waiter = server.connect(application_name="patient")
    other_role.execute("SELECT pg_advisory_lock(100, 1), pg_advisory_lock(4711), pg_advisory_lock(-1, -2)")
    other_role.execute("SELECT pg_advisory_lock(-1), pg_advisory_lock_shared(100, 7)")
    other_database.execute("SELECT pg_advisory_lock(100, 99)")
    thread = threading.Thread(target=lambda: waiter.execute("SELECT pg_advisory_lock(100, 1)"))
    thread.start()
    until(lambda: any(not lock[4] for lock in server.locks()))
    yield {"role": other_role, "database": other_database}
    other_role.close()
    thread.join()
    waiter.close()
    other_database.close()
    server.sql(f'DROP DATABASE "{name}_other" WITH (FORCE)')


def test_every_kind_of_lock(status: Any, strangers: Any, role: str) -> None:
    """Keys as they are written, this database's alone, held or waiting; who and since when."""
    _, rows = status("--json")
    assert all(list(row) == FIELDS for row in rows)
    assert [(row["key"], row["kind"], row["mode"], row["state"]) for row in rows] == [
        ("-1:-2", "pair", "exclusive", "held"),
        ("100:1", "pair", "exclusive", "held"),
        ("100:1", "pair", "exclusive", "waiting"),
        ("100:7", "pair", "shared", "held"),
        ("bigint:-1", "bigint", "exclusive", "held"),
        ("bigint:4711", "bigint", "exclusive", "held"),
    ]
    assert {row["user"] for row in rows if row["state"] == "held"} == {role}
    assert all(row["since"] and row["by"] == "other" and row["hidden"] == [] for row in rows)
    _, lines = status()
    assert [line.split('  "')[0].split() for line in lines[1:]] == [
        ["-1:-2", "held"],
        ["100:1", "held"],
        ["100:1", "waiting"],
        ["100:7", "held,", "shared"],
        ["bigint:-1", "held"],
        ["bigint:4711", "held"],
    ]


def test_what_a_plain_role_may_not_see(status: Any, server: Server, role: str) -> None:
    """Of another role's session it is said what is hidden, and who could see it; nothing is left blank."""
    with server.connect(application_name="psql") as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        dsn = make_conninfo(server.dsn, user=role, password="right")
        _, [row] = status("--json", dsn=dsn)
        assert row["hidden"] == ["since", "host", "run_id", "reason", "until", "window_s"]
        assert (row["application"], row["since"], row["state"]) == ("psql", None, "held")
        _, lines = status(dsn=dsn)
        assert lines[1].endswith("; since, host, run_id, reason, until, window_s hidden: needs pg_monitor")
        assert lines[1].count("since") == 1
        server.sql(f"GRANT pg_monitor TO {role}")
        _, [row] = status("--json", dsn=dsn)
        assert row["hidden"] == []


def test_run_and_its_name(status: Any, run: StartRun, table: str) -> None:
    """A run is shown with its name, its start and its window; a slot of a range, with the range's name."""
    going = run("--config", table, "--key", "daily_sales", "--key", "workers", "--", "sleep", "60")
    going.command()
    _, rows = status("--config", table, "--json")
    assert [(row["key"], row["name"], row["by"]) for row in rows] == [
        ("100:1", "daily_sales", "run"),
        ("200:10", "workers", "run"),
    ]
    assert rows[0]["run_id"]
    assert rows[0]["window_s"] == 7.5
    going.popen.terminate()
    going.code()


def test_waiting_run_says_since_when(status: Any, run: StartRun, server: Server) -> None:
    """A run that queues is shown from its beginning, though it queues in slices."""
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        waiting = run("--key", "100:1", "--wait", "60", "--", "true")
        first = until(lambda: [row for row in status("--json")[1] if row["state"] == "waiting" and row["run_id"]])
        until(
            lambda: server.sql(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND waitstart > clock_timestamp() - interval '0.5 s' AND waitstart > %s::timestamptz + interval '1 s'",
                first[0]["since"],
            )[0][0]
        )
        again = until(lambda: [row for row in status("--json")[1] if row["state"] == "waiting" and row["run_id"]])
        assert again[0]["since"] == first[0]["since"]
    assert waiting.code() == 0


def test_exit_code(status: Any, server: Server) -> None:
    """As in a shell's `if`: 0 free, 1 held; a free key is shown as free, and to wait is not to hold."""
    assert status("--key", "100:1", "--exit-code")[0] == 0
    assert status("--key", "100:1")[1][1].split() == ["100:1", "free"]
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        assert status("--key", "100:1", "--exit-code")[0] == 1
        assert status("--key", "100:2", "--exit-code")[0] == 0
        assert status("--key", "100:1")[0] == 0
        assert status("--key", "100:0..3", "--json", "--exit-code")[0] == 1
    shell = 'if "$@" status --key 100:1 --exit-code >/dev/null; then echo free; else echo held; fi'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *COMMAND],
        check=True,
        env=clean_environment(BATCHGUARD_DSN=server.dsn),
        capture_output=True,
    )
    assert done.stdout == b"free\n"


def test_key_from_name(status: Any, run: StartRun) -> None:
    """A text's hash is found, and called by its text."""
    going = run("--key-from-name", "日次売上", "--", "sleep", "60")
    going.command()
    code, lines = status("--key-from-name", "日次売上", "--exit-code")
    assert code == 1
    assert lines[1].startswith("bigint:")
    assert " 日次売上  held" in lines[1]
    going.popen.terminate()
    going.code()


def test_retired_numbers_may_be_looked_at(status: Any, table: str, server: Server) -> None:
    """What must not be used any more may well be held."""
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 9)")
        for key in ("old_export", "100:9"):
            _, lines = status("--config", table, "--key", key)
            assert lines[1].startswith("100:9 old_export (retired)  held  ")


def test_json_lines_are_read_by_python(status: Any, strangers: Any, start: StartRun) -> None:
    """The pipe that the help shows works."""
    done = subprocess.run(
        [sys.executable, "-m", "json.tool", "--json-lines"],
        input="\n".join(json.dumps(row) for row in status("--json")[1]),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count('"state"') == 6


def test_prepared_transaction(status: Any, workshop: Workshop) -> None:
    """A lock that no session has is shown, and named for what it is."""
    server = workshop.build(max_prepared_transactions="2")
    with server.connect() as psql:
        psql.execute("BEGIN; SELECT pg_advisory_xact_lock(100, 1); PREPARE TRANSACTION 'half'")
    _, lines = status(dsn=server.dsn)
    assert lines[1].split("  ")[-1] == "a prepared transaction, see pg_prepared_xacts"
    server.sql("ROLLBACK PREPARED 'half'")
    server.stop("immediate")


@pytest.mark.slow
def test_takes_no_lock(start: StartRun, server: Server, run: StartRun) -> None:
    """Runs beside a status that looks without pause: none is skipped for it."""
    watching = start("status", "--watch", "0.1s", "--json")
    until(lambda: any("status" in session[1] for session in server.sessions()))
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda n: run("--key", f"100:{n}", "--", "true").code(), range(40)))
    assert codes == [0] * 40
    watching.popen.send_signal(signal.SIGINT)
    assert watching.code() == 0


def test_watch(start: StartRun, server: Server) -> None:
    """--watch looks again until Ctrl-C; a server that is gone for a while is said to be."""
    shown = start("status", "--watch", "0.2s", "--key", "100:1", "--exit-code", stdout=subprocess.PIPE)
    assert shown.popen.stdout is not None
    assert shown.popen.stdout.readline().startswith(b"# advisory locks of")
    assert shown.popen.stdout.readline().split() == [b"100:1", b"free"]
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        until(lambda: b"held" in shown.popen.stdout.readline())  # type: ignore[union-attr]
        shown.popen.send_signal(signal.SIGINT)
        assert shown.code() == 1


def test_watch_outlives_the_server(start: StartRun, private_server: PrivateServer) -> None:
    """A restart under --watch: the reason is shown, then the locks again."""
    shown = start("status", "--watch", "0.2s", dsn=private_server.dsn)
    stream = shown.popen.stdout
    assert stream is not None
    until(lambda: stream.readline() == b"none\n")
    private_server.stop("fast")
    until(lambda: b"cannot reach" in stream.readline())
    private_server.start()
    until(lambda: stream.readline() == b"none\n")
    shown.popen.send_signal(signal.SIGINT)
    assert shown.code() == 0


@pytest.mark.parametrize(("colour", "columns"), [(True, 60), (False, 60), (True, 140)])
def test_terminal(server: Server, terminal: list[Terminal], colour: bool, columns: int) -> None:
    """On a terminal a table fits the width; with NO_COLOR there is not one escape."""
    with server.connect(application_name="psql") as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        more = {} if colour else {"NO_COLOR": "1"}
        environment = clean_environment(BATCHGUARD_DSN=server.dsn, TERM="xterm-256color", **more)
        environment.pop("COLUMNS", None)
        argv = ["sh", "-c", f'stty cols {columns}; "$@" status; echo end', "sh", *COMMAND]
        terminal.append(Terminal(argv, environment))
        until(lambda: terminal[-1].shows("end\r\n"))
    shown = terminal[-1].shown
    assert ("\x1b[" in shown) == colour
    assert "LOCK" in shown
    if not colour:
        lines = shown.splitlines()
        assert all(len(line) <= columns for line in lines)
        assert "100:1  held" in shown


def test_pipe_has_no_escape_and_no_rich(start: StartRun, strangers: Any) -> None:
    """One line a lock, as tools read them."""
    shown = start("status", env={"TERM": "xterm-256color"})
    assert shown.code() == 0
    assert "\x1b" not in shown.out
    assert len(shown.out.splitlines()) == 7


def test_what_a_stranger_says_is_not_obeyed(status: Any, server: Server) -> None:
    """A comment that looks like ours may be anybody's: no line break and no escape of it gets out."""
    with server.connect(application_name="batchguard hold 100:1 evil@x") as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        psql.execute('/* batchguard {"reason":"a\\\\u001b[2J\\\\nb [red]","until":7,"window_s":1e99} */ SELECT 1')
        _, lines = status()
    assert len(lines) == 2
    assert "\x1b" not in lines[1]
    assert "[red]" in lines[1]


def test_through_a_transaction_pooler(status: Any, make_pooler: MakePooler, server: Server) -> None:
    """Looking needs no session of its own, and leaves nothing set in the pool's."""
    pooled = make_pooler("transaction", size=1)
    with server.connect(application_name="psql") as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        for _ in range(2):
            assert status("--key", "100:1", "--exit-code", dsn=pooled.dsn)[0] == 1
    assert pooled.sql("SHOW search_path") == [('"$user", public',)]


def test_whatever_the_roles_defaults_are(status: Any, server: Server, role: str) -> None:
    """A search path that hides the catalog, serializable, a short timeout: the same answer."""
    server.sql(f"CREATE SCHEMA AUTHORIZATION {role}")
    for setting in (f"search_path = {role}, pg_catalog", "default_transaction_isolation = serializable"):
        server.sql(f"ALTER ROLE {role} SET {setting}")
    with server.connect(user=role, password="right") as psql:
        psql.execute(f"CREATE VIEW {role}.pg_locks AS SELECT 1 AS nothing")
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        code, _ = status("--key", "100:1", "--exit-code", dsn=make_conninfo(server.dsn, user=role, password="right"))
    assert code == 1


def test_vanished_client(status: Any, server: Server, run: StartRun) -> None:
    """Keeper and guard stopped: no check comes, and it is said when the server would free the lock."""
    going = run("--key", "100:1", "--", "sleep", "60")
    going.command()
    for pid in (going.guard, going.keeper):
        os.kill(pid, signal.SIGSTOP)
    until(lambda: "if its host is gone, the server frees the lock within" in status()[1][1])
    for pid in (going.keeper, going.guard):
        os.kill(pid, signal.SIGCONT)
    going.popen.terminate()
    assert going.code() in (76, 143)


def test_ten_thousand_locks(status: Any, workshop: Workshop) -> None:
    """All of them in a pipe, and --key finds the one."""
    server = workshop.build(max_locks_per_transaction="300")
    with server.connect() as psql:
        psql.execute("SELECT count(pg_advisory_lock(200, n)) FROM generate_series(1, 10000) n")
        assert len(status(dsn=server.dsn)[1]) == 10001
        _, lines = status("--key", "200:7777", dsn=server.dsn)
        assert len(lines) == 2
        assert lines[1].startswith("200:7777  held")
    server.stop("immediate")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--watch", "soon"], 64, '--watch: "soon" is not a duration'),
        (["--watch", "0"], 64, "--watch: 0.1s is the shortest"),
        (["--key-from-name", "a\nb"], 64, "--key-from-name takes up to 1000 characters of text"),
        (["--key", "100"], 78, 'key "100" is one number'),
        (["--key", "daily"], 78, '"daily" is neither a key such as 100:1 nor a known name'),
        (["--dsn", "host=127.0.0.1 port=1"], 69, "cannot reach 127.0.0.1:1 (connection refused), exit 69."),
    ],
)
def test_errors(start: StartRun, arguments: list[str], code: int, message: str) -> None:
    """One line, and what to do."""
    shown = start("status", *arguments)
    assert shown.code() == code
    assert shown.err.startswith(f"batchguard: {message}")
    assert shown.err.count("\n") == 1


def test_reader_that_has_seen_enough(start: StartRun, server: Server) -> None:
    """Status | head: the end of the pipe is the end, without a word."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    shown = start("status", stdout=write_end)
    os.close(write_end)
    assert shown.code() == 141
    assert shown.err == ""


def test_terminal_of_another_encoding(start: StartRun, server: Server) -> None:
    """A letter that cannot be shown is written as a number."""
    with server.connect(application_name="batchguard hold 100:1 a@b") as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        psql.execute('/* batchguard {"reason":"移行"} */ SELECT 1')
        shown = start("status", env={"PYTHONIOENCODING": "latin-1"})
        assert shown.code() == 0
    assert '"\\u79fb\\u884c"' in shown.out


def test_names_the_config_file(start: StartRun, table: str) -> None:
    """With -v."""
    shown = start("status", "-v", "--config", table)
    assert shown.code() == 0
    assert shown.err == f"batchguard: config file: {table}\n"
    assert Path(table).exists()
