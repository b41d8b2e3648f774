"""Every interleaving of the protocol, within stated bounds: see `model.py`."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from batchguard.core.timing import Timing
from tests.faults.model import KILL_TAKES, Bounds, Found, Search

pytestmark = pytest.mark.slow
SAFE = Timing(check_interval=1, check_timeout=1, kill_after=1, ttl=9)
WINDOW = int(SAFE.window)
Measure = Callable[..., None]


def written(timing: Timing) -> str:
    """Write a timing with the letters that its sum is told in."""
    return f"C={timing.check_interval} Q={timing.check_timeout} G={timing.kill_after} S={timing.ttl}"


def written_events(events: dict[str, int]) -> str:
    """Write how often what may happen."""
    return " ".join(f"{name}={number}" for name, number in events.items())


def explore(measure: Measure, what: str, bounds: Bounds, stop_at: float = 0) -> Found:
    """Search, and note how many states that took."""
    found = Search(bounds, stop_at).run()
    overlap = "none" if found.longest is None else f"{found.longest} s"
    measure("model", what, states=str(found.states), overlap=overlap)
    return found


@pytest.mark.parametrize(
    "timing",
    [SAFE, Timing(2, 1, 1, 10), Timing(1, 2, 1, 11), Timing(1, 1, 2, 10)],
    ids=written,
)
def test_no_overlap_where_the_server_only_falls_silent(timing: Timing, measure: Measure) -> None:
    """W < S: whatever the network does, with a process killed and one stopped twice, nobody needs to settle."""
    assert timing.window + 1 == timing.ttl
    found = explore(measure, f"any network, {written(timing)}", Bounds(timing))
    assert found.longest is None, found.way
    assert found.states > 10_000


@pytest.mark.parametrize(
    "events",
    [
        {"terminations": 1},
        {"unlocks": 1},
        {"terminations": 1, "unlocks": 1, "pauses": 0},
        {"restarts": 1, "terminations": 1, "deaths": 0, "pauses": 0},
    ],
    ids=lambda events: " ".join(name for name in events if events[name]),
)
def test_no_overlap_with_settle_always(events: dict[str, int], measure: Measure) -> None:
    """Settle > W: no overlap either when the lock is freed at once by the server or behind our back."""
    bounds = replace(Bounds(SAFE, settle="always", pauses=1), **events)  # type: ignore[arg-type]
    found = explore(measure, f"settle always, {written_events(events)}", bounds)
    assert found.longest is None, found.way
    assert found.states > 10_000


@pytest.mark.parametrize("faults", [{"pauses": 0}, {"deaths": 0, "pauses": 1}], ids=["death", "pause"])
def test_no_overlap_with_settle_auto_after_a_restart(faults: dict[str, int], measure: Measure) -> None:
    """Auto sees that the server was started, and waits."""
    bounds = replace(Bounds(SAFE, settle="auto", restarts=1), **faults)  # type: ignore[arg-type]
    found = explore(measure, f"settle auto, restart, {written_events(faults)}", bounds)
    assert found.longest is None, found.way
    assert found.states > 10_000


def test_overlap_with_settle_auto_after_a_terminated_backend(measure: Measure) -> None:
    """Auto cannot see it; where the news comes through and no process is faulty, the overlap is at most G + M."""
    bounds = Bounds(SAFE, settle="auto", terminations=1, prompt=True, deaths=0, pauses=0)
    found = explore(measure, "settle auto, backend terminated, news at once", bounds, stop_at=100)
    assert found.longest == SAFE.kill_after + KILL_TAKES


def test_overlap_without_settling_is_bounded_by_the_window(measure: Measure) -> None:
    """Off, any network, any fault: no overlap is longer than W, and one is that long."""
    bounds = Bounds(SAFE, settle="off", terminations=1, pauses=1)
    found = explore(measure, "settle off, backend terminated", bounds, stop_at=100)
    assert found.longest == WINDOW


BROKEN = {
    "S = W": Bounds(replace(SAFE, ttl=WINDOW)),
    "settle = W": Bounds(SAFE, settle=float(WINDOW), terminations=1, deaths=0, pauses=1),
    "client's TCP timeout below S": Bounds(SAFE, client_timeout=2),
    "window reckoned too short": Bounds(
        SAFE, settle="always", reckoned=replace(SAFE, kill_after=0.1, check_timeout=0.1), terminations=1, pauses=0
    ),
    "keeper blocks": Bounds(SAFE, keeper_blocks=True),
    "two faults at once": Bounds(SAFE, faults_at_once=2),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_overlap_is_found_when_a_rule_is_broken(broken: str, measure: Measure) -> None:
    """The search can fail: without any one of the rules it finds an overlap."""
    found = explore(measure, f"broken: {broken}", BROKEN[broken])
    assert found.longest == 0
    assert found.way[-1] in ("B gets the lock", "a second passes")


def test_a_patient_client_changes_nothing(measure: Measure) -> None:
    """The client's TCP timeout that we set, above 2 S, never ends a session under a living tree."""
    found = explore(measure, "client's TCP timeout 2 S", Bounds(SAFE, client_timeout=2 * SAFE.ttl, pauses=1))
    assert found.longest is None, found.way
