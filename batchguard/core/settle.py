"""Settling: how long a new holder waits before its command starts, because an old one may still be dying.

A lock that the server frees at once (restart, crash, promotion) is free before the tree that ran
under it is dead; that tree is dead after the old run's window at the latest.
"""

from dataclasses import dataclass
from typing import Literal

from batchguard.core.durations import format_duration

SettleMode = Literal["auto", "always", "off"]
Settle = SettleMode | float
"""`auto`, `always`, `off`, or a fixed number of seconds."""

BORN_WITH_START = 5.0
"""A cluster whose first start followed its initdb within this many seconds never had an old holder."""

MARGIN = 0.5
"""Equal is not enough: the wait must be more than the window."""


@dataclass(frozen=True)
class ServerAge:
    """How long ago, by the server's own clock and in seconds, each thing happened that frees all locks.

    None: it did not happen, or cannot be told. `writable_s` is exact and known only to roles with
    pg_monitor; the others are what any role may see.
    """

    started_s: float | None = None
    born_before_start_s: float | None = None
    recovered_s: float | None = None
    promoted_s: float | None = None
    writable_s: float | None = None


@dataclass(frozen=True)
class SettleDecision:
    """How long to wait (seconds), and why; `reason` completes "because …"."""

    wait_s: float = 0.0
    reason: str = ""


def decide_settle(
    settle: Settle, age: ServerAge, window: float, abandoned_window: float | None = None
) -> SettleDecision:
    """Decide how long to wait between taking the lock and starting the command.

    Args:
        settle: what the user asked for.
        age: what the server tells of itself.
        window: seconds until the tree of an old run is dead at the latest.
        abandoned_window: the same for the run that we queued behind, when its lock came free
            without being given back; None when it was given back.
    """
    if settle == "off":
        return SettleDecision()
    if settle == "always":
        return SettleDecision(window + MARGIN, "--settle always waits at every start")
    if isinstance(settle, float):
        return SettleDecision(settle, f"--settle {format_duration(settle)} asks for it")
    waits = [
        SettleDecision(window + MARGIN - max(ago, 0.0), f"the server {what} {format_duration(max(ago, 0.0))} ago")
        for ago, what in _reasons(age)
        if ago <= window
    ]
    if abandoned_window is not None:
        waits.append(SettleDecision(abandoned_window + MARGIN, "the run before did not give the lock back"))
    return max(waits, key=lambda decision: decision.wait_s, default=SettleDecision())


def _reasons(age: ServerAge) -> list[tuple[float, str]]:
    """List what freed all locks and when; a negative age, a clock set back, counts as just now."""
    first_start = age.born_before_start_s is not None and 0 <= age.born_before_start_s <= BORN_WITH_START
    if age.writable_s is not None:
        is_first = first_start and age.promoted_s is None and _belongs_to_start(age.writable_s, age.started_s)
        return [] if is_first else [(age.writable_s, "began to take writes")]
    reasons = []
    if age.started_s is not None and not first_start:
        reasons.append((age.started_s, "was started"))
    if age.recovered_s is not None and not (first_start and _belongs_to_start(age.recovered_s, age.started_s)):
        reasons.append((age.recovered_s, "recovered from a crash (or had its statistics reset)"))
    if age.promoted_s is not None:
        reasons.append((age.promoted_s, "became the primary"))
    return reasons


def _belongs_to_start(ago_s: float, started_s: float | None) -> bool:
    """Tell what a new cluster's first start does from what a crash or a promotion causes later."""
    return started_s is not None and ago_s > started_s - BORN_WITH_START
