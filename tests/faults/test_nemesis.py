"""A short storm for each setting of settle, and the checker itself; the long storm is `python -m tests.faults.nemesis`."""

import pytest

from tests.faults.nemesis import EXPECTED_CODES, Batch, Nemesis, find_overlaps
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
    nemesis = Nemesis(workshop, settle, seed, starts=150)
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


def test_the_checker_finds_overlaps() -> None:
    """Two of one key that are alive at once are found, in any order, with how long; of two keys they are not."""
    one, two, other = Batch(1, 0, 7, 10.0, 12.0), Batch(2, 1, 7, 11.5, 11.7), Batch(3, 1, 8, 10.0, 12.0)
    after = Batch(4, 2, 7, 12.1, 13.0)
    found = find_overlaps([after, other, two, one])
    assert [(first, second) for first, second, _ in found] == [(one, two)]
    assert found[0][2] == pytest.approx(0.2)
