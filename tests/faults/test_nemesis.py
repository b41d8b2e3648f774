"""A short storm for each setting of settle, and the checker itself; the long storm is `python -m tests.faults.nemesis`."""

from dataclasses import replace

import pytest

from batchguard.core.timing import KILL_TAKES_EFFECT
from tests.faults.nemesis import EXPECTED_CODES, RESET_LASTS, TIMING, Batch, Deed, Nemesis, allowed, find_overlaps
from tests.fixtures.hosts import require_namespaces
from tests.fixtures.measure import Measure
from tests.fixtures.server import Workshop


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("settle", ["always", "auto", "off"])
def test_storm(settle: str, seed: int, workshop: Workshop, measure: Measure) -> None:
    """always: no overlap; auto: only what a lock freed without a trace explains; off: none longer than the window."""
    require_namespaces()
    nemesis = Nemesis(workshop, settle, seed, starts=200)
    outcome = nemesis.run()
    nemesis.leave()
    measure(
        "nemesis",
        f"settle {settle}, seed {seed}",
        starts=str(outcome.starts),
        batches=str(outcome.batches),
        deeds=str(outcome.deeds.total()),
        overlaps=str(len(outcome.overlaps)),
        longest=f"{outcome.longest:.2f}",
    )
    assert outcome.unexplained == [], str(outcome)
    assert settle != "always" or outcome.overlaps == []
    assert set(outcome.codes) <= EXPECTED_CODES, str(outcome)
    assert outcome.runs_afterwards, str(outcome)
    assert outcome.batches >= (2 if settle == "always" else 5), str(outcome)
    assert outcome.deeds.total() >= 3, str(outcome)


ONE, TWO = Batch(1, 0, 7, 10.0, 12.0), Batch(2, 1, 7, 11.5, 11.7)


def test_the_checker_finds_overlaps() -> None:
    """Two of one key that are alive at once are found, in any order, with how long; of two keys they are not."""
    other, after = Batch(3, 1, 8, 10.0, 12.0), Batch(4, 2, 7, 12.1, 13.0)
    found = find_overlaps([after, other, TWO, ONE])
    assert [(first, second) for first, second, _ in found] == [(ONE, TWO)]
    assert found[0][2] == pytest.approx(0.2)


GRACE = TIMING.kill_after + KILL_TAKES_EFFECT
TERMINATED = Deed("backend terminated", None, 11.2, 11.2, key=7)


@pytest.mark.parametrize(
    ("settle", "deeds", "seconds"),
    [
        ("auto", [], 0.0),
        ("off", [], 0.0),
        ("always", [TERMINATED], 0.0),
        ("auto", [TERMINATED], GRACE),
        ("off", [TERMINATED], TIMING.window),
        ("auto", [replace(TERMINATED, key=8)], 0.0),  # another key's session
        ("auto", [replace(TERMINATED, begun=9.0, ended=9.0)], 0.0),  # before the first batch
        ("auto", [replace(TERMINATED, begun=9.8, ended=9.8)], GRACE),  # when it was about to start
        ("auto", [replace(TERMINATED, begun=11.6, ended=11.6)], 0.0),  # after the second began
        ("auto", [Deed("server crashed", None, 11.2)], 0.0),
        ("off", [Deed("server crashed", None, 11.2)], TIMING.window),
        ("auto", [TERMINATED, Deed("guard stopped", 0, 11.0, 11.4)], TIMING.window),
        ("auto", [TERMINATED, Deed("guard stopped", 1, 11.0, 11.4)], GRACE),  # on another host
        ("auto", [TERMINATED, Deed("cable pulled", 0, 3.0, 4.0)], GRACE),  # long over
        ("auto", [Deed("server reset", 0, 11.2, 11.5)], TIMING.check_interval + RESET_LASTS + GRACE),
        ("auto", [Deed("server reset", 1, 11.2, 11.5)], 0.0),
        ("auto", [Deed("cable pulled", 0, 10.5, 15.0)], 0.0),
    ],
)
def test_what_the_checker_excuses(settle: str, deeds: list[Deed], seconds: float) -> None:
    """Only what befell this key, on this host, while the first batch held the lock, explains an overlap."""
    assert allowed(settle, deeds, ONE, TWO) == pytest.approx(seconds)
