"""Settling: how long a new holder waits."""

import pytest

from batchguard.core.settle import MARGIN, ServerAge, decide_settle

OLD = ServerAge(started_s=1e6, born_before_start_s=1e6, recovered_s=2e6)


def test_auto_costs_nothing_on_a_normal_day() -> None:
    """A server that has been up for long is not waited for."""
    assert decide_settle("auto", OLD, 55).wait_s == 0


@pytest.mark.parametrize(
    ("age", "reason"),
    [
        (ServerAge(started_s=10, born_before_start_s=1e6), "was started 10s ago"),
        (ServerAge(started_s=1e6, born_before_start_s=1e6, recovered_s=10), "recovered from a crash"),
        (ServerAge(started_s=1e6, born_before_start_s=1e6, promoted_s=10), "became the primary 10s ago"),
        (ServerAge(started_s=1e6, born_before_start_s=1e6, writable_s=10), "began to take writes 10s ago"),
    ],
)
def test_auto_waits_for_the_rest_of_the_window(age: ServerAge, reason: str) -> None:
    """Whatever freed all locks ten seconds ago leaves 45 of 55 seconds to wait, and a margin."""
    decision = decide_settle("auto", age, 55)
    assert decision.wait_s == 45 + MARGIN
    assert reason in decision.reason


def test_the_exact_answer_beats_the_others() -> None:
    """A role with pg_monitor knows when writes began; what looks like a crash then was a statistics reset."""
    age = ServerAge(started_s=1e6, born_before_start_s=1e6, recovered_s=1, promoted_s=0, writable_s=1e6)
    assert decide_settle("auto", age, 55).wait_s == 0


def test_a_new_cluster_has_no_old_holder() -> None:
    """The first start after initdb is not waited for, though everything about it is new."""
    age = ServerAge(started_s=1, born_before_start_s=2, recovered_s=1.8, writable_s=0.9)
    assert decide_settle("auto", age, 55).wait_s == 0


def test_a_new_cluster_that_crashed_has() -> None:
    """A crash after the first start counts."""
    age = ServerAge(started_s=60, born_before_start_s=2, recovered_s=5)
    assert decide_settle("auto", age, 55).wait_s == 50 + MARGIN


@pytest.mark.parametrize(
    ("writable_s", "promoted_s", "wait_s"),
    [
        (20, 0, 35 + MARGIN),  # promoted 20 s ago, whatever a plain role would have to fear
        (59, 0, 0),  # promoted longer ago than the window, though in the server's first seconds
        (20, None, 35 + MARGIN),  # recovered from a crash
        (59.5, None, 0),  # the first start
    ],
)
def test_the_exact_answer_on_a_new_cluster(writable_s: float, promoted_s: float | None, wait_s: float) -> None:
    """On a cluster that was born with its start, 60 s ago, the exact answer counts too."""
    age = ServerAge(started_s=60, born_before_start_s=2, recovered_s=59.9, promoted_s=promoted_s, writable_s=writable_s)
    assert decide_settle("auto", age, 55).wait_s == wait_s


def test_a_standby_of_a_new_cluster_that_was_promoted_at_once() -> None:
    """Promoted within the first seconds: somebody may have held the lock on the old primary."""
    age = ServerAge(started_s=6, born_before_start_s=3, recovered_s=5.9, promoted_s=0, writable_s=3)
    assert decide_settle("auto", age, 55).wait_s == 52 + MARGIN


def test_auto_waits_for_a_run_that_lost_its_lock() -> None:
    """Queued behind a run whose lock came free without being given back: its whole window."""
    decision = decide_settle("auto", OLD, 55, abandoned_window=70)
    assert decision.wait_s == 70 + MARGIN
    assert decide_settle("off", OLD, 55, abandoned_window=70).wait_s == 0


def test_a_clock_set_back_counts_as_just_now() -> None:
    """A negative age never waits longer than a whole window."""
    assert decide_settle("auto", ServerAge(started_s=-3600, born_before_start_s=1e6), 55).wait_s == 55 + MARGIN
    assert decide_settle("auto", ServerAge(started_s=10, born_before_start_s=-1), 55).wait_s == 45 + MARGIN


def test_the_other_settings() -> None:
    """Off waits for nothing, always for more than a window, a number for itself."""
    fresh = ServerAge(started_s=0)
    assert decide_settle("off", fresh, 55).wait_s == 0
    assert decide_settle("always", OLD, 55).wait_s > 55
    assert decide_settle(7.0, OLD, 55).wait_s == 7
