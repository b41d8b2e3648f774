"""Poolers and proxies in between: what shares sessions is refused, what does not is measured against."""

import re
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from tests.fixtures.batch import command
from tests.fixtures.guard import StartRun
from tests.fixtures.pooler import MakePooler
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.server import Server
from tests.fixtures.waiting import until
from tests.fixtures.watch import alive

REFUSED = (
    r'batchguard: cannot guard 100:1: "\w+" on 127.0.0.1:\d+ is reached through a pooler that shares sessions, so two runs '
    r"could both hold the lock. Connect directly; if it pools whole sessions, say so with --allow-pooler. "
    r"Not started, exit 78.\n"
)


@pytest.mark.event("the run is refused")
@pytest.mark.parametrize("mode", ["transaction", "statement", "session"])
def test_a_pooler_is_refused(mode: str, run: StartRun, make_pooler: MakePooler) -> None:
    """Pgbouncer in any mode: the backend is not the one that the login named; never started, 78."""
    pooled = make_pooler(mode)
    refused = run("--key", "100:1", "--", "echo", "ran", dsn=pooled.dsn)
    assert (refused.code(), refused.out) == (78, "")
    assert re.fullmatch(REFUSED, refused.err)


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_pooler_that_keeps_one_backend_is_refused(mode: str, run: StartRun, make_pooler: MakePooler) -> None:
    """Every client on one and the same backend, where two could get the same lock: refused all the same."""
    pooled = make_pooler(mode, size=1)
    for _ in range(2):
        refused = run("--key", "100:1", "--", "echo", "ran", dsn=pooled.dsn)
        assert (refused.code(), refused.out) == (78, "")
        assert re.fullmatch(REFUSED, refused.err)


def test_a_shared_backend_that_holds_the_key_is_seen_through(
    run: StartRun, make_pooler: MakePooler, server: Server
) -> None:
    """--allow-pooler against the facts: in transaction mode, the second run finds the key on its own backend; 78."""
    pooled = make_pooler("transaction", size=1)
    first = run("--key", "100:1", "--allow-pooler", "--", "sleep", "600", dsn=pooled.dsn)
    until(server.locks)
    second = run("--key", "100:1", "--allow-pooler", "--", "echo", "ran", dsn=pooled.dsn)
    assert (second.code(), second.out) == (78, "")
    assert re.fullmatch(REFUSED, second.err)
    first.popen.terminate()
    first.code()


def test_a_session_pooler_that_is_allowed(run: StartRun, make_pooler: MakePooler, server: Server) -> None:
    """A pooler of whole sessions works with --allow-pooler: held, skipped, given back, for nobody to inherit."""
    pooled = make_pooler("session")
    first = run("-v", "--key", "100:1", "--allow-pooler", "--", "sleep", "600", dsn=pooled.dsn)
    first.command()
    assert "--allow-pooler" in first.err
    assert "cannot be seen from here" in first.err
    second = run("--key", "100:1", "--allow-pooler", "--", "echo", "ran", dsn=pooled.dsn)
    assert (second.code(), second.out) == (75, "")
    first.popen.terminate()
    assert first.code() == 143
    until(lambda: not server.locks())
    third = run("--key", "100:1", "--allow-pooler", "--", "echo", "ran", dsn=pooled.dsn)
    assert (third.code(), third.out) == (0, "ran\n")


def test_a_session_pooler_loses_its_backend(
    run: StartRun, make_pooler: MakePooler, server: Server, tmp_path: Path
) -> None:
    """The backend behind a session pooler is terminated: lost, dead, 76."""
    pooled = make_pooler("session")
    batch = command(tmp_path / "life", 600, "--stubborn", "--child")
    running = run("--key", "100:1", "--allow-pooler", "--", *batch, dsn=pooled.dsn)
    until(lambda: len(running.tree()) == 2)
    tree, pid = running.tree(), server.locks()[0][5]
    server.sql("SELECT pg_terminate_backend(%s)", pid)
    assert running.code() == 76
    assert alive(tree) == []


def test_a_plain_proxy_is_no_pooler(run: StartRun, server: Server, make_proxy: MakeProxy, tmp_path: Path) -> None:
    """A TCP proxy passes as a server. Frozen, it answers the server's probes in our name: dead long before that ends."""
    proxy = make_proxy(server.host_and_port)
    dsn = make_conninfo(server.dsn, host="127.0.0.1", port=proxy.port)
    batch = command(tmp_path / "life", 600, "--stubborn", "--child")
    running = run("--key", "100:1", "--", *batch, dsn=dsn)
    until(lambda: len(running.tree()) == 2)
    tree = running.tree()
    proxy.freeze()
    assert running.code() == 76
    assert alive(tree) == []
    assert server.locks()  # what keeps the session alive now is the proxy: the lock is held too long, never too short
    proxy.thaw()
