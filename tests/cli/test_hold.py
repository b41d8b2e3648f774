"""`batchguard hold`: a batch is paused by hand."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from batchguard.adapters import process_tree
from tests.fixtures.cluster import Cluster
from tests.fixtures.guard import COMMAND, Run, StartRun, clean_environment
from tests.fixtures.pooler import MakePooler
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.server import PrivateServer, Server
from tests.fixtures.terminal import Terminal
from tests.fixtures.waiting import until


@pytest.fixture
def hold(start: StartRun, table: str) -> StartRun:
    """Start `batchguard hold ARG…` with short timings."""

    def begin(*arguments: str, **how: Any) -> Run:
        return start("hold", "--config", table, *arguments, **how)

    return begin


def is_on_hold(held: Run) -> bool:
    """Tell whether the hold has said that it has begun."""
    return " is on hold" in held.err


def end(held: Run, number: int = signal.SIGTERM) -> int:
    """End a hold as its user would."""
    held.popen.send_signal(number)
    return held.code()


def test_run_is_skipped_and_told_why(hold: StartRun, run: StartRun) -> None:
    """A run names the hold, its end and its reason; --for ends it by itself, and then runs start again."""
    began = time.time()
    held = hold("--key", "daily_sales", "--for", "3s", "--reason", "DB移行")
    until(lambda: is_on_hold(held))
    assert re.search(
        r'100:1 daily_sales in "\w+" on 127\.0\.0\.1:\d+ is on hold until [-0-9]+ [:0-9]+ \w+: "DB移行"\. '
        r"Runs that start meanwhile are skipped, not postponed\. To end it sooner: Ctrl-C\n",
        held.err,
    )
    skipped = run("-v", "--key", "100:1", "--", "true")
    assert skipped.code() == 75
    assert re.search(r': on hold by \w+@\S+ until [:0-9]+ \w+: "DB移行"; exit 75\.$', skipped.err.rstrip())
    assert held.code() == 0
    assert 3 <= time.time() - began < 8
    assert held.err.rstrip().endswith("is no longer on hold, after 3s.")
    assert run("--key", "100:1", "--", "true").code() == 0


def test_until(hold: StartRun, server: Server) -> None:
    """--until ends at that moment of the wall clock, not before."""
    end_at = time.time() + 3
    text = time.strftime("%H:%M:%S", time.localtime(end_at))
    held = hold("--key", "100:1", "--until", text)
    until(lambda: is_on_hold(held))
    assert f" {text} " in held.err
    assert held.code() == 0
    assert int(end_at) <= time.time() < end_at + 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_cleanly(hold: StartRun, server: Server, number: int) -> None:
    """Ctrl-C, TERM and HUP give the key back, and that is how a hold ends: exit 0."""
    held = hold("--key", "100:1")
    until(lambda: is_on_hold(held))
    assert len(server.locks()) == 1
    assert end(held, number) == 0
    assert server.locks() == []
    assert "is no longer on hold" in held.err


def test_closed_terminal_ends_it(server: Server, terminal: list[Terminal], table: str) -> None:
    """Somebody closes the window: the key is free."""
    argv = [*COMMAND, "hold", "--config", table, "--key", "100:1"]
    window = Terminal(argv, clean_environment(BATCHGUARD_DSN=server.dsn))
    until(lambda: window.shows("is on hold"))
    os.close(window.fd)
    os.waitpid(window.pid, 0)
    assert server.locks() == []


def test_busy_key(hold: StartRun, run: StartRun) -> None:
    """Without --wait it names who has the key, and the option that takes over."""
    going = run("--key", "100:1", "--", "sleep", "60")
    going.command()
    refused = hold("--key", "100:1")
    assert refused.code() == 75
    assert re.search(
        r"cannot hold 100:1 daily_sales in .*: held by run 100:1@\S+, since [:0-9]+ \(.*\), backend \d+, .*; exit 75\. "
        r"To take over when it ends: --wait 10m, or --wait forever\n$",
        refused.err,
    )
    short = hold("--key", "100:1", "--wait", "1s")
    assert short.code() == 75
    assert re.search(r": still held by run .* after 1(\.\d)?s of waiting; exit 75\.\n$", short.err)
    going.popen.terminate()
    going.code()


def test_takes_over(hold: StartRun, run: StartRun, tmp_path: Path) -> None:
    """--wait forever: the current run ends in peace, the next is skipped."""
    done = tmp_path / "done"
    going = run("--key", "100:1", "--", "sh", "-c", f"sleep 2; touch {done}")
    going.command()
    held = hold("--key", "100:1", "--wait", "forever")
    until(lambda: "waiting for 100:1" in held.err)
    assert not is_on_hold(held)
    assert going.code() == 0
    until(lambda: is_on_hold(held))
    assert done.exists()
    assert run("--key", "100:1", "--", "true").code() == 75
    assert end(held) == 0


def test_waits_only_as_long_as_it_would_hold(hold: StartRun, server: Server) -> None:
    """The time is over before the key was free."""
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        held = hold(
            "--key", "100:1", "--wait", "forever", "--until", time.strftime("%H:%M:%S", time.localtime(time.time() + 2))
        )
        assert held.code() == 75
    assert "was never on hold: the time was over before the key was free" in held.err


def test_wait_outlives_a_restart(hold: StartRun, private_server: PrivateServer) -> None:
    """The server restarts under a wait: the wait goes on."""
    with private_server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        held = hold("-v", "--key", "100:1", "--wait", "forever", dsn=private_server.dsn)
        until(lambda: "waiting for" in held.err)
        private_server.stop("fast")
        until(lambda: "trying again\n" in held.err)
        private_server.start()
    until(lambda: is_on_hold(held))
    assert end(held) == 0


def test_interrupted_while_waiting(hold: StartRun, server: Server) -> None:
    """Nothing was held: gone at once, 128+n."""
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        held = hold("--key", "100:1", "--wait", "forever")
        until(lambda: "waiting for" in held.err)
        assert end(held, signal.SIGINT) == 130


def test_range_and_category(hold: StartRun, server: Server, run: StartRun) -> None:
    """Of a range every slot, of a category every listed key; all or none."""
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(200, 12)")
        refused = hold("--key", "workers", "--all", "sales")
        assert refused.code() == 75
        assert len(server.locks()) == 1
    held = hold("--key", "workers", "--all", "sales")
    until(lambda: is_on_hold(held))
    assert [lock[:2] for lock in server.locks()] == [(100, 1), (100, 2), (200, 10), (200, 11), (200, 12)]
    assert run("--key", "200:10..12", "--", "true").code() == 75
    assert end(held) == 0


def test_pauses_shared_runs(hold: StartRun, run: StartRun) -> None:
    """New shared holders come after a waiting hold, and are skipped under it."""
    reader = run("--key", "100:1", "--shared", "--", "sleep", "60")
    reader.command()
    held = hold("--key", "100:1", "--wait", "forever")
    until(lambda: "waiting for" in held.err)
    until(lambda: run("--key", "100:1", "--shared", "--", "true").code() == 75)
    reader.popen.terminate()
    reader.code()
    until(lambda: is_on_hold(held))
    assert end(held) == 0


def test_restart_of_the_server(hold: StartRun, private_server: PrivateServer) -> None:
    """Lost through a restart: taken again, and both moments are said."""
    held = hold("--key", "100:1", dsn=private_server.dsn)
    until(lambda: is_on_hold(held))
    private_server.stop("fast")
    until(lambda: "lost the hold of 100:1" in held.err)
    private_server.start()
    until(lambda: "is on hold again since" in held.err)
    assert len(private_server.locks()) == 1
    assert re.search(
        r"is on hold again since \d\d:\d\d:\d\d\. It was lost at \d\d:\d\d:\d\d \(the server ended the session \(57P01\)\): "
        "look whether a run started in between",
        held.err,
    )
    assert end(held) == 0
    assert private_server.locks() == []


def test_crash_of_the_server(hold: StartRun, private_server: PrivateServer) -> None:
    """Lost through a crash, after which the postmaster is the same: taken again."""
    held = hold("--key", "100:1", dsn=private_server.dsn)
    until(lambda: is_on_hold(held))
    private_server.crash()
    until(lambda: "is on hold again since" in held.err)
    assert end(held) == 0


def test_failover(hold: StartRun, make_cluster: Callable[..., Cluster]) -> None:
    """Lost with the primary: taken again on the new one."""
    cluster = make_cluster()
    held = hold("--key", "100:1", dsn=cluster.dsn)
    until(lambda: is_on_hold(held))
    cluster.catch_up()
    cluster.primary.stop("fast")
    cluster.promote()
    until(lambda: "is on hold again since" in held.err)
    assert len(cluster.primary.locks()) == 1
    assert end(held) == 0


@pytest.mark.slow
def test_silent_network(hold: StartRun, server: Server, make_proxy: MakeProxy, run: StartRun) -> None:
    """The network is silent for a while: the key is never free, and the hold goes on over a new session."""
    proxy = make_proxy(server.host_and_port)
    held = hold("--key", "100:1", dsn=make_conninfo(server.dsn, host=proxy.host, port=proxy.port))
    until(lambda: is_on_hold(held))
    [first] = server.locks()
    proxy.freeze()
    until(lambda: "no answer for 1s" in held.err)
    assert server.locks() == [first]
    proxy.thaw()
    free = []

    def is_back() -> bool:
        free.append(not [lock for lock in server.locks() if lock[4]])
        return "is on hold again since" in held.err

    until(is_back)
    assert not any(free)
    assert end(held) == 0


def test_released_by_somebody(hold: StartRun, server: Server) -> None:
    """Its session was ended and the server lives on: that is an order, not an accident."""
    held = hold("--key", "100:1")
    until(lambda: is_on_hold(held))
    server.terminate_holder()
    assert held.code() == 76
    assert re.search(
        r"the hold of 100:1 daily_sales in .* was released by somebody at \d\d:\d\d:\d\d: its session was ended "
        r"\(57P01\) and the server did not restart; exit 76\.\n$",
        held.err,
    )


@pytest.mark.slow
def test_released_while_the_network_was_silent(
    hold: StartRun, start: StartRun, table: str, server: Server, make_proxy: MakeProxy
) -> None:
    """Somebody ends the hold of a host that cannot be reached: it does not come back with the network."""
    proxy = make_proxy(server.host_and_port)
    held = hold("--key", "100:1", dsn=make_conninfo(server.dsn, host=proxy.host, port=proxy.port))
    until(lambda: is_on_hold(held))
    proxy.freeze()
    freeing = start("force-unlock", "--config", table, "--key", "100:1", "--yes")
    assert freeing.code() == 0
    until(lambda: "no answer for 1s" in held.err)
    proxy.thaw()
    assert held.code() == 76
    assert "was released by somebody" in held.err


def test_ends_while_lost(hold: StartRun, private_server: PrivateServer) -> None:
    """Its time is over while the server is away: that it was lost is the last word."""
    held = hold("--key", "100:1", "--for", "4s", dsn=private_server.dsn)
    until(lambda: is_on_hold(held))
    private_server.stop("fast")
    assert held.code() == 76
    assert re.search(r"ended, but was lost at .* and not taken again: look whether a run started", held.err)


def test_others_run_while_lost(hold: StartRun, run: StartRun, private_server: PrivateServer) -> None:
    """A run got in after a restart: the hold waits for its end, and says so."""
    dsn = private_server.dsn
    held = hold("--key", "100:1", dsn=dsn)
    until(lambda: is_on_hold(held))
    os.kill(held.keeper, signal.SIGSTOP)
    private_server.restart("fast")
    going = run("--key", "100:1", "--", "sleep", "3", dsn=dsn)
    going.command()
    os.kill(held.keeper, signal.SIGCONT)
    until(lambda: re.search("waiting for 100:1 .* held by run 100:1@", held.err))
    assert going.code() == 0
    until(lambda: "is on hold again since" in held.err)
    assert end(held) == 0


def test_detached(start: StartRun, table: str, server: Server, tmp_path: Path) -> None:
    """--detach comes back once the key is held, prints the pid, and leaves a process that outlives the login."""
    log = tmp_path / "log"
    with log.open("wb") as stream:
        begun = start("hold", "--config", table, "--key", "100:1", "--detach", start_new_session=True, stderr=stream)
        assert begun.code() == 0
    pid = int(begun.out)
    assert len(server.locks()) == 1
    assert os.getsid(pid) == pid
    assert f"To end it: kill {pid} on this host, or batchguard force-unlock" in log.read_text()
    os.kill(pid, signal.SIGTERM)
    until(lambda: server.locks() == [])
    until(lambda: "is no longer on hold" in log.read_text())
    until(lambda: process_tree.inspect(pid) is None or process_tree.inspect(pid).is_dead)  # type: ignore[union-attr]
    process_tree.reap()


def test_detached_whose_login_is_gone(start: StartRun, table: str, server: Server, tmp_path: Path) -> None:
    """The login ends while it waits, with every standard descriptor closed: it takes the key, and TERM ends it."""
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        begun = start("hold", "--config", table, "--key", "100:1", "--detach", "--wait", "1m")
        until(lambda: any(not lock[4] for lock in server.locks()))
        [pid] = process_tree.children(begun.popen.pid)
        begun.popen.kill()
        begun.popen.wait()
    until(lambda: [lock[4] for lock in server.locks()] == [True])
    time.sleep(1)  # it goes on: what it has to say of that reaches nobody
    assert len(server.locks()) == 1
    os.kill(pid, signal.SIGTERM)
    until(lambda: server.locks() == [])
    until(process_tree.reap)


def test_detached_and_busy(start: StartRun, table: str, server: Server) -> None:
    """What keeps it from holding is said before the prompt is back, with its exit code."""
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        refused = start("hold", "--config", table, "--key", "100:1", "--detach")
        assert refused.code() == 75
    assert "cannot hold 100:1" in refused.err
    assert refused.out == ""
    unreachable = start("hold", "--key", "100:1", "--detach", dsn="host=127.0.0.1 port=1")
    assert unreachable.code() == 69
    assert unreachable.err == (
        "batchguard: cannot reach 127.0.0.1:1 (connection refused): 100:1 is not on hold, exit 69.\n"
    )


def test_detached_lets_go_of_its_pipes(server: Server, table: str) -> None:
    """Ssh host batchguard hold --detach: whoever reads our stdout and stderr sees their end."""
    argv = [*COMMAND, "hold", "--config", table, "--key", "100:1", "--detach"]
    environment = clean_environment(BATCHGUARD_DSN=server.dsn)
    done = subprocess.run(argv, capture_output=True, env=environment, timeout=20, check=True)
    os.kill(int(done.stdout), signal.SIGTERM)
    until(lambda: server.locks() == [])
    until(lambda: process_tree.inspect(int(done.stdout)).is_dead)  # type: ignore[union-attr]
    process_tree.reap()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 64, "which key? Give --key 100:1 or a name, or --all CATEGORY"),
        (["--key", "100:1", "--for", "1h", "--until", "06:00"], 64, "--for and --until both say when it ends"),
        (
            ["--key", "100:1", "--until", "25:00"],
            64,
            '--until: "25:00" is not a time; write 06:00, or 2026-12-01 06:00',
        ),
        (["--key", "100:1", "--for", "0"], 64, "--for 0 would end before it began"),
        (["--key", "100:1", "--wait", "long"], 64, '--wait: "long" is not a duration'),
        (["--key", "100:1", "--reason", "a\nb"], 64, "--reason: a reason is one line of text"),
        (["--key", "100:9"], 78, "100:9 is retired (old_export, "),
        (["--all", "mail"], 78, 'no key of category "mail" is listed in '),
        (["--key", "100"], 78, 'key "100" is one number'),
    ],
)
def test_errors(hold: StartRun, arguments: list[str], code: int, message: str) -> None:
    """One line, and what to do."""
    refused = hold(*arguments)
    assert refused.code() == code
    assert refused.err.startswith(f"batchguard: {message}")
    assert refused.err.count("\n") == 1


def test_transaction_pooler(
    hold: StartRun, start: StartRun, table: str, make_pooler: MakePooler, server: Server
) -> None:
    """Through a pooler that shares sessions neither a hold nor a freed key would be ours."""
    pooled = make_pooler("transaction")
    refused = hold("--key", "100:1", dsn=pooled.dsn)
    assert refused.code() == 78
    assert re.search(r"cannot hold 100:1 .* say so with --allow-pooler\. Not on hold, exit 78\.\n$", refused.err)
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        refused = start("force-unlock", "--config", table, "--key", "100:1", "--yes", dsn=pooled.dsn)
        assert refused.code() == 78
        assert refused.err.endswith("say so with --allow-pooler. Nobody was ended, exit 78.\n")
        assert psql.execute("SELECT 1").fetchone() == (1,)


def test_session_pooler(hold: StartRun, make_pooler: MakePooler) -> None:
    """With the operator's word for it."""
    held = hold("--key", "100:1", "--allow-pooler", dsn=make_pooler("session").dsn)
    until(lambda: is_on_hold(held))
    assert end(held) == 0


def test_standby(hold: StartRun, make_cluster: Callable[..., Cluster]) -> None:
    """Its locks exclude nobody."""
    refused = hold("--key", "100:1", dsn=make_cluster().standby.dsn)
    assert refused.code() == 78
    assert "is a standby and its locks exclude nobody" in refused.err
    assert refused.err.endswith("Not on hold, exit 78.\n")


def test_role_without_rights(hold: StartRun, server: Server, role: str) -> None:
    """A hold needs the functions that wait, too; the GRANT is in the line."""
    [(database,)] = server.sql("SELECT current_database()")
    server.sql("REVOKE EXECUTE ON FUNCTION pg_advisory_lock(int, int) FROM public")
    try:
        refused = hold("--key", "100:1", dsn=make_conninfo(server.dsn, user=role, password="right"))
        assert refused.code() == 77
        assert f"GRANT EXECUTE ON FUNCTION pg_advisory_lock(int, int) TO {role}; Not on hold, exit 77." in refused.err
        assert database in refused.err
    finally:
        server.sql("GRANT EXECUTE ON FUNCTION pg_advisory_lock(int, int) TO public")
