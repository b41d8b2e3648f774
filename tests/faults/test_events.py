"""Every event is caused for real, and the times it takes are measured."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.batch import command, read_life
from tests.fixtures.events import EVENTS
from tests.fixtures.guard import Run, StartRun
from tests.fixtures.measure import Measure
from tests.fixtures.proxy import MakeProxy, Proxy
from tests.fixtures.server import PrivateServer
from tests.fixtures.waiting import until
from tests.fixtures.watch import watch

TESTS = Path(__file__).parent.parent


def test_every_event_has_a_test() -> None:
    """No row of the list is without a test that causes it."""
    found = {name for file in TESTS.rglob("test_*.py") for name in _marked(file.read_text())}
    assert found == set(EVENTS)


def _marked(text: str) -> list[str]:
    return [name for names in re.findall(r"mark\.event\(([^)]*)\)", text) for name in re.findall(r'"([^"]+)"', names)]


Cause = Callable[[Run, PrivateServer, Proxy], object]


def _send(who: str, number: int) -> Cause:
    return lambda running, server, proxy: os.kill(getattr(running, who), number)


MEASURED: dict[str, tuple[Cause, int]] = {
    "our backend is terminated": (lambda running, server, proxy: server.terminate_holder(), 76),
    "unlocked behind our back": (
        lambda running, server, proxy: proxy.inject("SELECT pg_advisory_unlock_all()"),
        76,
    ),
    "connection reset": (lambda running, server, proxy: proxy.cut(), 76),
    "guard killed": (_send("guard", signal.SIGKILL), 76),
    "keeper killed": (_send("keeper", signal.SIGKILL), -signal.SIGKILL),
    "keeper stopped": (_send("keeper", signal.SIGSTOP), 76),
}
LATEST = 2.5
"""Seconds in which a batch that heeds TERM is dead, on a machine that is busy with other tests."""
FREED_AT_ONCE = ("our backend is terminated", "unlocked behind our back", "connection reset")


@pytest.mark.event(
    "our backend is terminated", "unlocked behind our back", "guard killed", "keeper killed", "keeper stopped"
)
@pytest.mark.parametrize("event", MEASURED)
def test_times(
    event: str,
    run: StartRun,
    private_server: PrivateServer,
    make_proxy: MakeProxy,
    measure: Measure,
    tmp_path: Path,
) -> None:
    """From the cause to TERM, to the tree's death, and to the lock's release: last, but where the server decides it."""
    proxy = make_proxy(private_server.host_and_port)
    dsn = f"{private_server.dsn} host=127.0.0.1 port={proxy.port}"
    running = run("--key", "100:1", "--", *command(tmp_path / "life", 600, "--child"), dsn=dsn)
    until(lambda: len(running.tree()) == 2)
    tree, cause = running.tree(), MEASURED[event][0]
    seen = watch(private_server, tree, lambda: cause(running, private_server, proxy))
    measure("events", event, **seen.times(read_life(tmp_path / "life")))
    assert seen.dead <= seen.free or event in FREED_AT_ONCE
    os.kill(running.keeper, signal.SIGCONT)
    assert running.code() == MEASURED[event][1]
    if event != "keeper stopped":
        assert seen.dead - seen.cause < LATEST
