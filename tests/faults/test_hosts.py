"""Hosts on cables that are cut in every way: the tree is always dead before the server frees the lock."""

import os
import signal
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from tests.fixtures.batch import boot_time, command, read_life
from tests.fixtures.guard import Run, StartRun
from tests.fixtures.hosts import Host, Network
from tests.fixtures.measure import Measure
from tests.fixtures.waiting import until
from tests.fixtures.watch import watch

pytestmark = pytest.mark.netns
WINDOW = 7.5
DUE = 0.2 + 1 + 1 + 0.5
"""Check interval, twice the timeout and the grace: what the window is without its 5 s for KILL to take effect."""
BUSY = 1.5
"""Seconds that a machine which is busy with other tests may take longer."""
CHECK_INTERVAL = 0.2

CUTS: dict[str, Callable[[Host], None]] = {
    "packets lost in both directions": lambda host: host.drop("to", "from"),
    "packets to the server lost": lambda host: host.drop("to"),
    "packets from the server lost": lambda host: host.drop("from"),
    "cable pulled": lambda host: host.pull_cable(),
    "connection reset at the client": lambda host: host.reset_client(),
}


def start_on(host: Host, run: StartRun, file: Path, *options: str) -> Run:
    """Start the batch that ignores TERM, with a child in a session of its own, on a host."""
    with host.inside():
        running = run("--key", "100:1", *options, "--", *command(file, 600, "--stubborn", "--child"), dsn=host.dsn)
    until(lambda: len(running.tree()) == 2)
    return running


@pytest.mark.event("the network is silent", "the server gives our session up")
@pytest.mark.parametrize("cut", CUTS)
def test_tree_is_dead_before_the_lock_is_free(
    cut: str, run: StartRun, network: Network, measure: Measure, tmp_path: Path
) -> None:
    """Cut: TERM, a grace, KILL, all within the window of the last good check; then the server frees the lock."""
    host = network.hosts[0]
    running = start_on(host, run, tmp_path / "life")
    seen = watch(network.server, running.tree(), lambda: CUTS[cut](host))
    life = read_life(tmp_path / "life")
    measure("hosts", cut, **seen.times(life))
    assert seen.alive_when_free == []
    assert seen.dead <= seen.free
    assert seen.begun < life.term < seen.dead < seen.last_check + WINDOW
    assert seen.dead < seen.last_check + DUE + BUSY
    assert running.code() == 76


@pytest.mark.event("the network is silent")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("who", ["keeper", "guard"])
def test_a_cut_and_a_process_fault(
    who: str, number: signal.Signals, run: StartRun, network: Network, measure: Measure, tmp_path: Path
) -> None:
    """Cut off, and one of our two processes killed or stopped the moment before: still dead first."""
    host = network.hosts[0]
    running = start_on(host, run, tmp_path / "life")
    tree, keeper, faulty = running.tree(), running.keeper, getattr(running, who)

    def cause() -> None:
        host.drop("to", "from")
        os.kill(faulty, number)

    seen = watch(network.server, tree, cause)
    life = read_life(tmp_path / "life")
    measure("hosts", f"packets lost in both directions, {who} {_WORDS[number]}", **seen.times(life))
    assert seen.alive_when_free == []
    assert seen.dead <= seen.free
    assert seen.dead < seen.last_check + WINDOW
    if faulty == keeper:
        os.kill(keeper, signal.SIGCONT)
    running.code()


_WORDS = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped"}


@pytest.mark.event("our backend is terminated")
def test_one_sided_reset(run: StartRun, network: Network, measure: Measure, tmp_path: Path) -> None:
    """The server alone is reset: the lock is free at once, while the host sees silence; --settle always outwaits it."""
    host, other = network.hosts
    running = start_on(host, run, tmp_path / "life")
    tree = running.tree()
    seen = watch(network.server, tree, host.reset_server)
    life = read_life(tmp_path / "life")
    measure("hosts", "connection reset at the server only", **seen.times(life))
    assert seen.free < seen.dead < seen.last_check + WINDOW
    assert running.code() == 76
    host.heal()

    running = start_on(host, run, tmp_path / "first")
    host.reset_server()
    until(lambda: not network.server.locks())
    freed = boot_time()
    with other.inside():
        second = run("--key", "100:1", "--settle", "always", "--", *command(tmp_path / "second", 0), dsn=other.dsn)
    assert second.code() == 0
    first_life, second_life = read_life(tmp_path / "first"), read_life(tmp_path / "second")
    measure(
        "hosts",
        "the same, another host with --settle always",
        dead=f"{first_life.last - freed:.2f}",
        next=f"{second_life.began - freed:.2f}",
    )
    assert first_life.last < second_life.began
    assert running.code() == 76


def test_shield_after_a_reset_that_the_host_hears_of(run: StartRun, network: Network, tmp_path: Path) -> None:
    """Reset at the server, then the cable is whole: the next check learns of it, and the shield goes up."""
    host = network.hosts[0]
    running = start_on(host, run, tmp_path / "life", "--kill-after", "2", "--ttl", "12")
    host.reset_server()
    until(lambda: not network.server.locks())
    host.heal()
    until(network.server.locks)
    assert network.server.sessions()[0][1] == "batchguard shield 100:1"
    assert running.tree()
    assert running.code() == 76


def test_short_cuts_cost_nothing(run: StartRun, network: Network, tmp_path: Path) -> None:
    """A cable that is pulled for less than the check timeout and put back leaves the batch alone."""
    host = network.hosts[0]
    timing = ("--check-timeout", "4", "--ttl", "20")
    with host.inside():
        running = run("--key", "100:1", *timing, "--", *command(tmp_path / "life", 3), dsn=host.dsn)
    until((tmp_path / "life").exists)
    host.pull_cable()
    begun = boot_time()
    until(lambda: boot_time() > begun + 3 * CHECK_INTERVAL)  # the cause itself: a cut of this length
    host.heal()
    assert (running.code(), running.err) == (0, "")


def test_another_host_skips_and_takes_over(run: StartRun, network: Network, tmp_path: Path) -> None:
    """Two hosts, one server: the second skips while the first is alive, and waits until it is dead when it is cut off."""
    host, other = network.hosts
    running = start_on(host, run, tmp_path / "first")
    with other.inside():
        assert run("--key", "100:1", "--", "true", dsn=other.dsn).code() == 75
    host.drop("to", "from")
    with other.inside():
        second = run("--key", "100:1", "--wait", "60", "--", *command(tmp_path / "second", 0), dsn=other.dsn)
    assert second.code() == 0
    assert read_life(tmp_path / "first").last < read_life(tmp_path / "second").began
    assert running.code() == 76


@pytest.mark.event("the server gives our session up")
def test_shield_of_a_host_that_vanishes_is_given_up(run: StartRun, network: Network, tmp_path: Path) -> None:
    """A host that is cut off while its shield holds the key does not keep it longer than a ttl."""
    host = network.hosts[0]
    running = start_on(host, run, tmp_path / "life", "--kill-after", "2", "--ttl", "12")
    network.server.terminate_holder()
    until(network.server.locks)
    host.drop("to", "from")
    cut = boot_time()
    assert running.code() == 76
    until(lambda: not network.server.locks(), within=20)
    assert 10 < boot_time() - cut < 16


@pytest.mark.event("our backend is terminated")
def test_shield_waits_for_what_is_left_of_a_session(run: StartRun, network: Network, tmp_path: Path) -> None:
    """Reset at the client only: the server keeps the old session until it probes it, and the shield takes over then."""
    host = network.hosts[0]
    running = start_on(host, run, tmp_path / "life", "--kill-after", "9", "--ttl", "17")
    old = network.server.locks()[0][5]
    host.reset_client()
    until(lambda: read_life(tmp_path / "life").term < inf)
    host.heal()
    assert [lock[5] for lock in network.server.locks()] == [old]
    until(lambda: [lock for lock in network.server.locks() if lock[5] != old])
    assert network.server.sessions()[0][1] == "batchguard shield 100:1"
    assert running.tree()
    assert running.code() == 76
