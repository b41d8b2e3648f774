"""`batchguard force-unlock`: freeing a key whose holder cannot be reached any other way."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.fixtures.guard import COMMAND, Run, StartRun, clean_environment
from tests.fixtures.hosts import Network
from tests.fixtures.server import Server, Workshop
from tests.fixtures.terminal import Terminal
from tests.fixtures.waiting import until


@pytest.fixture
def force(start: StartRun, table: str) -> StartRun:
    """Start `batchguard force-unlock ARG…` with short timings."""

    def begin(*arguments: str, **how: Any) -> Run:
        return start("force-unlock", "--config", table, *arguments, **how)

    return begin


@pytest.mark.slow
def test_keeps_the_next_start_out(force: StartRun, run: StartRun, server: Server, tmp_path: Path) -> None:
    """A run that cannot hear is ended; who starts meanwhile is skipped until its batch is surely dead."""
    going = run("--key", "100:1", "--", "sleep", "600")
    going.command()
    os.kill(going.guard, signal.SIGSTOP)
    os.kill(going.keeper, signal.SIGSTOP)
    began = time.time()
    freeing = force("--key", "100:1", "--yes")
    codes = []
    while freeing.popen.poll() is None:
        codes.append(run("--key", "100:1", "--", "true").code())
    took = time.time() - began
    assert freeing.code() == 0
    assert took >= 7.5
    assert set(codes[:-1]) == {75}
    assert re.search(r"100:1 daily_sales in .*: run 100:1@\S+, since .*\n", freeing.err)
    assert re.search(r"ended run 100:1@\S+ \(backend \d+\)\. Keeping 100:1 .* for 7\.5s, until what ran", freeing.err)
    assert freeing.err.rstrip().endswith(" is free.")
    assert run("--key", "100:1", "--", "true").code() == 0
    os.kill(going.keeper, signal.SIGCONT)
    os.kill(going.guard, signal.SIGCONT)
    assert going.code() == 76


def test_wins_against_a_poller(force: StartRun, server: Server) -> None:
    """Somebody asks for the key a thousand times a second: the queue comes first, every time."""
    for _ in range(4):
        with server.connect() as holder, server.connect() as poller:
            holder.execute("SELECT pg_advisory_lock(100, 1)")
            freeing = force("--key", "100:1", "--yes")
            got = False
            while not got and "Keeping" not in freeing.err:
                got = poller.execute("SELECT pg_try_advisory_lock(100, 1)").fetchone() == (True,)
            assert not got
            freeing.popen.send_signal(signal.SIGINT)
            assert freeing.code() == 0


def test_now(force: StartRun, server: Server) -> None:
    """--now ends the session and keeps nothing."""
    with server.connect(application_name="hung") as holder:
        holder.execute("SELECT pg_advisory_lock(100, 1)")
        freeing = force("--key", "100:1", "--yes", "--now")
        assert freeing.code() == 0
        assert re.search(r'100:1 daily_sales in .* is free: ended "hung" \(backend \d+\)\.\n$', freeing.err)
        assert server.locks() == []


def test_free_already(force: StartRun) -> None:
    """Nobody holds it: nothing to do."""
    freeing = force("--key", "100:1", "--yes")
    assert freeing.code() == 0
    assert "is free; there is no session to end." in freeing.err


def test_several_shared_holders(force: StartRun, server: Server) -> None:
    """All that hold the key are ended."""
    with server.connect() as one, server.connect() as two:
        for connection in (one, two):
            connection.execute("SELECT pg_advisory_lock_shared(100, 1)")
        freeing = force("--key", "100:1", "--yes")
        until(lambda: "Keeping" in freeing.err)
        assert [lock[3] for lock in server.locks()] == ["ExclusiveLock"]
        freeing.popen.send_signal(signal.SIGINT)
        assert freeing.code() == 0


def test_ends_a_hold_for_good(force: StartRun, start: StartRun, table: str, server: Server) -> None:
    """A hold left open does not come back, and there is no batch to wait for."""
    held = start("hold", "--config", table, "--key", "100:1")
    until(lambda: " is on hold" in held.err)
    freeing = force("--key", "100:1", "--yes")
    assert freeing.code() == 0
    assert " is free: ended hold " in freeing.err
    assert held.code() == 76
    assert "was released by somebody" in held.err
    assert server.locks() == []


def test_who_waited_comes_first(force: StartRun, server: Server) -> None:
    """Who has queued for longer has the key next, as it would have anyway; it is said, and nothing waits for its end."""
    with server.connect() as holder, server.connect(application_name="patient") as patient:
        holder.execute("SELECT pg_advisory_lock(100, 1)")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(patient.execute, "SELECT pg_advisory_lock(100, 1)")
            until(lambda: any(not lock[4] for lock in server.locks()))
            freeing = force("--key", "100:1", "--yes")
            assert freeing.code() == 0
    assert re.search(r'was freed, and is held by who waited for it: "patient", since', freeing.err)


@pytest.mark.netns
def test_client_that_vanished(force: StartRun, network: Network) -> None:
    """A cable is pulled from a foreign program: PostgreSQL would keep its lock for hours; now it is free."""
    host = network.hosts[0]
    with host.inside():
        gone = psycopg.connect(host.dsn, application_name="jar", autocommit=True)
    gone.execute("SELECT pg_advisory_lock(100, 1)")
    host.pull_cable()
    freeing = force("--key", "100:1", "--yes", "--now", dsn=network.server.dsn)
    assert freeing.code() == 0
    assert 'is free: ended "jar"' in freeing.err
    assert network.server.locks() == []
    gone.close()


def test_holder_that_changed(server: Server, terminal: list[Terminal], table: str) -> None:
    """While somebody reads the question, the holder becomes another one: nobody is ended."""
    environment = clean_environment(BATCHGUARD_DSN=server.dsn)
    with server.connect(application_name="first") as first, server.connect(application_name="second") as second:
        first.execute("SELECT pg_advisory_lock(100, 1)")
        terminal.append(Terminal([*COMMAND, "force-unlock", "--config", table, "--key", "100:1"], environment))
        asked = terminal[-1]
        until(lambda: asked.shows("[y/N]"))
        first.execute("SELECT pg_advisory_unlock(100, 1)")
        second.execute("SELECT pg_advisory_lock(100, 1)")
        asked.type(b"y\n")
        until(lambda: asked.shows("nobody was ended, exit 75"))
        assert asked.code() == 75
        assert second.execute("SELECT 1").fetchone() == (1,)
        assert first.execute("SELECT 1").fetchone() == (1,)


def test_asks_on_a_terminal(server: Server, terminal: list[Terminal], table: str) -> None:
    """It shows who it is and asks; no answer but yes ends anybody."""
    environment = clean_environment(BATCHGUARD_DSN=server.dsn)
    with server.connect(application_name="psql") as holder:
        holder.execute("SELECT pg_advisory_lock(100, 1)")
        terminal.append(Terminal([*COMMAND, "force-unlock", "--config", table, "--key", "100:1"], environment))
        until(lambda: terminal[-1].shows("End this session? A batch that runs under it is killed. [y/N]"))
        assert terminal[-1].shows('"psql", since')
        terminal[-1].type(b"n\n")
        until(lambda: terminal[-1].shows("nobody was ended, exit 75."))
        assert terminal[-1].code() == 75
        assert holder.execute("SELECT 1").fetchone() == (1,)


def test_needs_yes_elsewhere(force: StartRun, server: Server) -> None:
    """Without a terminal nobody is asked, and nobody ended."""
    with server.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(100, 1)")
        refused = force("--key", "100:1")
        assert refused.code() == 64
        assert "without a terminal to ask, say --yes" in refused.err
        assert holder.execute("SELECT 1").fetchone() == (1,)


@pytest.fixture
def other_role(server: Server, role: str) -> Any:
    """Give a holder of a second plain role, and what runs as the first."""
    name = f"{role}_holder"
    server.sql(f"CREATE ROLE {name} LOGIN PASSWORD 'right'")
    holder = server.connect(user=name, password="right", application_name="hung")
    holder.execute("SELECT pg_advisory_lock(100, 1)")
    yield make_conninfo(server.dsn, user=role, password="right")
    holder.close()
    until(lambda: server.locks() == [])
    server.sql(f"DROP ROLE {name}")


@pytest.mark.parametrize(
    ("granted", "missing"),
    [
        ([], "GRANT pg_signal_backend, pg_read_all_stats TO"),
        (["pg_signal_backend"], "GRANT pg_read_all_stats TO"),
        (["pg_monitor"], "GRANT pg_signal_backend TO"),
    ],
)
def test_missing_rights(
    force: StartRun, other_role: str, server: Server, role: str, granted: list[str], missing: str
) -> None:
    """Each right that is missing is named, and never taken for a holder that changed."""
    for right in granted:
        server.sql(f"GRANT {right} TO {role}")
    refused = force("--key", "100:1", "--yes", dsn=other_role)
    assert refused.code() == 77
    assert f"{missing} {role}; Nobody was ended, exit 77." in refused.err
    assert len(server.locks()) == 1


def test_rights_that_do(force: StartRun, other_role: str, server: Server, role: str) -> None:
    """With both rights it works; pg_monitor has one of them."""
    server.sql(f"GRANT pg_monitor, pg_signal_backend TO {role}")
    freeing = force("--key", "100:1", "--yes", "--now", dsn=other_role)
    assert freeing.code() == 0


def test_superusers_session(force: StartRun, server: Server, role: str) -> None:
    """No right but a superuser's ends a superuser's session."""
    if server.sql("SELECT rolsuper FROM pg_roles WHERE rolname = current_user") != [(True,)]:
        pytest.skip("the test's own role is no superuser")
    server.sql(f"GRANT pg_monitor, pg_signal_backend TO {role}")
    with server.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(100, 1)")
        refused = force("--key", "100:1", "--yes", dsn=make_conninfo(server.dsn, user=role, password="right"))
        assert refused.code() == 77
        assert "is a superuser's session, which only a superuser may end" in refused.err


def test_prepared_transaction(force: StartRun, workshop: Workshop) -> None:
    """No session has it, so none can be ended; what ends it is said."""
    server = workshop.build(max_prepared_transactions="2")
    with server.connect() as psql:
        psql.execute("BEGIN; SELECT pg_advisory_xact_lock(100, 1); PREPARE TRANSACTION 'half'")
    refused = force("--key", "100:1", "--yes", dsn=server.dsn)
    assert refused.code() == 78
    assert "ROLLBACK PREPARED 'gid'" in refused.err
    server.sql("ROLLBACK PREPARED 'half'")
    server.stop("immediate")


def test_lost_while_keeping(force: StartRun, server: Server) -> None:
    """Somebody ends our own session too: that the key was not kept is said."""
    with server.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(100, 1)")
        freeing = force("--key", "100:1", "--yes")
        until(lambda: "Keeping" in freeing.err)
        server.terminate_holder()
        assert freeing.code() == 69
        assert re.search(
            r"ended .*, but did not keep 100:1 .* \(our session was ended, 57P01\): a run may start beside", freeing.err
        )


def test_all_keys_of_a_session_are_kept(force: StartRun, run: StartRun, server: Server) -> None:
    """A run with two keys is ended through one of them: neither is free before its batch is surely dead."""
    going = run("--key", "100:1", "--key", "100:2", "--", "sleep", "600")
    going.command()
    os.kill(going.guard, signal.SIGSTOP)
    os.kill(going.keeper, signal.SIGSTOP)
    freeing = force("--key", "100:1", "--key", "100:2", "--yes")
    until(lambda: "Keeping" in freeing.err)
    assert [lock[1] for lock in server.locks() if lock[4]] == [1, 2]
    assert run("--key", "100:2", "--", "true").code() == 75
    assert freeing.code() == 0
    assert "100:2 monthly_close" in freeing.err
    os.kill(going.keeper, signal.SIGCONT)
    os.kill(going.guard, signal.SIGCONT)
    assert going.code() == 76


def test_which_key(force: StartRun) -> None:
    """Without a key nothing can be meant."""
    assert force().code() == 64
