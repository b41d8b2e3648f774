"""The keeper's policy from the moment it holds the lock: check, tell, stand in for the guard, give back.

The keeper owns the session and never ends it while the batch lives. It leaves the batch to the
guard, unless the guard is gone, or has not ended the batch in time after a loss; then it kills the
guard, and the kernel hands it everything that the guard had below it.

`step` is pure, as the guard's is: see `core/guard.py` for how to read this file.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import inf

from batchguard.core.guard import SUSPENDED_AFTER
from batchguard.core.outcome import Ending, LostWhy
from batchguard.core.timing import KILL_TAKES_EFFECT, Timing

GUARD_IS_LATE = 0.5
"""How long after the guard's own KILL the keeper takes over: time for a busy machine, small beside the 5 s
that the timing chain leaves for a KILL to take effect."""


# Events


@dataclass(frozen=True)
class CheckAnswered:
    """The server answered a check: whether our backend holds the lock, and whether it is a primary."""

    held: bool
    primary: bool


@dataclass(frozen=True)
class SessionEnded:
    """The server ended the session, or the connection broke."""


@dataclass(frozen=True)
class ReleaseAsked:
    """The guard says that the batch is over."""


@dataclass(frozen=True)
class UnlockAnswered:
    """The server answered the unlock: whether the lock was still held."""

    was_held: bool


@dataclass(frozen=True)
class GuardGone:
    """The guard's process ended; what it had below it is below us now."""


@dataclass(frozen=True)
class TreeGone:
    """Nothing of the batch is left below us."""


@dataclass(frozen=True)
class DeadlinePassed:
    """The keeper's deadline is over; `slept_s` is how long the loop was away."""

    slept_s: float = 0.0


Event = CheckAnswered | SessionEnded | ReleaseAsked | UnlockAnswered | GuardGone | TreeGone | DeadlinePassed


# Actions


@dataclass(frozen=True)
class SendCheck:
    """Ask the server whether we still hold the lock."""


@dataclass(frozen=True)
class PublishCheck:
    """Let the guard see the moment of the last good check."""

    checked_at: float


@dataclass(frozen=True)
class TellLost:
    """Tell the guard that the lock is lost."""

    why: LostWhy


@dataclass(frozen=True)
class RaiseShield:
    """Take the key again on a new session, so that nobody else starts while the tree dies."""


@dataclass(frozen=True)
class LockAgain:
    """Take the key again on the session that still lives, for the same reason."""


@dataclass(frozen=True)
class KillGuard:
    """Send KILL to the guard, which did not end the batch in time."""


@dataclass(frozen=True)
class KillTree:
    """Send KILL to everything below us, again and again until nothing is left."""


@dataclass(frozen=True)
class ReportUnkillable:
    """Name the processes that a KILL did not end; the lock stays held."""


@dataclass(frozen=True)
class SendUnlock:
    """Give the lock back."""


@dataclass(frozen=True)
class CloseSession:
    """End the session, and the shield with it."""


@dataclass(frozen=True)
class TellUnlocked:
    """Tell the guard what became of the lock."""

    was_held: bool | None


@dataclass(frozen=True)
class Exit:
    """Report, and leave."""


Action = (
    SendCheck
    | PublishCheck
    | TellLost
    | RaiseShield
    | LockAgain
    | KillGuard
    | KillTree
    | ReportUnkillable
    | SendUnlock
    | CloseSession
    | TellUnlocked
    | Exit
)


class State(Enum):
    """Where the lock stands."""

    HOLDING = auto()  # held, and checked
    LOST = auto()  # lost, and the guard told; it ends the batch
    TAKING_OVER = auto()  # no guard any more; we end the batch
    RELEASING = auto()  # the unlock is under way
    CLOSED = auto()  # the session is over; the guard is about to leave
    ENDED = auto()


@dataclass(frozen=True)
class Keeper:
    """All that the keeper knows; `deadline` is the next moment at which it must act by itself."""

    timing: Timing = field(default_factory=Timing)
    state: State = State.HOLDING
    deadline: float = inf
    checked_at: float = -inf
    asked_at: float | None = None
    lost_why: LostWhy | None = None
    take_over_at: float = inf
    release_by: float = inf
    guard_lives: bool = True
    took_over: bool = False
    reported_unkillable: bool = False
    was_held: bool | None = None


Step = tuple[Keeper, tuple[Action, ...]]


def start_keeper(timing: Timing, checked_at: float) -> Keeper:
    """Give the keeper that has just taken the lock, with a question that left at `checked_at`."""
    return _with_deadline(Keeper(timing=timing, checked_at=checked_at))


def step(keeper: Keeper, event: Event, now: float) -> Step:
    """Give the keeper after `event` at `now`, and what to do, in this order."""
    after, actions = TABLE[keeper.state][type(event)](keeper, event, now)
    return _with_deadline(after), actions


def _with_deadline(keeper: Keeper) -> Keeper:
    match keeper.state:
        case State.HOLDING if keeper.asked_at is None:
            due = keeper.checked_at + keeper.timing.check_interval
            deadline = min(due, keeper.timing.lock_deadline(keeper.checked_at))
        case State.HOLDING:
            deadline = _patience(keeper)
        case State.LOST:
            deadline = keeper.take_over_at
        case State.TAKING_OVER:
            deadline = inf if keeper.reported_unkillable else keeper.take_over_at + KILL_TAKES_EFFECT
        case State.RELEASING | State.CLOSED:
            deadline = keeper.release_by
        case State.ENDED:
            deadline = inf
    return replace(keeper, deadline=deadline)


def _patience(keeper: Keeper) -> float:
    """Give the moment at which the check under way counts as failed, or the last good one as too old."""
    asked_at = keeper.checked_at if keeper.asked_at is None else keeper.asked_at
    return min(asked_at + keeper.timing.check_timeout, keeper.timing.lock_deadline(keeper.checked_at))


# While the lock is held


def _answered(keeper: Keeper, event: CheckAnswered, now: float) -> Step:
    asked_at = keeper.checked_at if keeper.asked_at is None else keeper.asked_at
    keeper = replace(keeper, asked_at=None)
    if not event.primary:
        return _lose(keeper, LostWhy.NOT_PRIMARY, now, RaiseShield())
    if not event.held:
        return _lose(keeper, LostWhy.UNLOCKED, now, LockAgain())
    return replace(keeper, checked_at=asked_at), (PublishCheck(asked_at),)


def _lose(keeper: Keeper, why: LostWhy, now: float, *shield: Action) -> Step:
    """Tell the guard first; the shield comes second, for the kill must not wait for it."""
    latest = min(now, keeper.timing.lock_deadline(keeper.checked_at)) + keeper.timing.kill_after
    keeper = replace(keeper, state=State.LOST, lost_why=why, take_over_at=max(now, latest) + GUARD_IS_LATE)
    return keeper, (TellLost(why), *shield)


def _session_ended(keeper: Keeper, event: SessionEnded, now: float) -> Step:
    return _lose(keeper, LostWhy.SESSION_ENDED, now, RaiseShield())


def _deadline_while_holding(keeper: Keeper, event: DeadlinePassed, now: float) -> Step:
    if now >= _patience(keeper) and (
        keeper.asked_at is not None or now >= keeper.timing.lock_deadline(keeper.checked_at)
    ):
        return _lose(keeper, LostWhy.SUSPENDED if event.slept_s > SUSPENDED_AFTER else LostWhy.SILENT, now)
    if keeper.asked_at is None and now >= keeper.checked_at + keeper.timing.check_interval:
        return replace(keeper, asked_at=now), (SendCheck(),)
    return keeper, ()


# While the batch dies


def _late_answer(keeper: Keeper, event: CheckAnswered, now: float) -> Step:
    """A loss stands, whatever the server says afterwards: the guard is killing already."""
    return replace(keeper, asked_at=None), ()


def _session_ended_after_loss(keeper: Keeper, event: SessionEnded, now: float) -> Step:
    """A silent server that now ends the session frees the lock: shield."""
    return keeper, (RaiseShield(),)


def _take_over(keeper: Keeper, event: GuardGone, now: float) -> Step:
    keeper = replace(keeper, state=State.TAKING_OVER, guard_lives=False, took_over=True, take_over_at=now)
    return keeper, (KillTree(),)


def _kill_late_guard(keeper: Keeper, event: DeadlinePassed, now: float) -> Step:
    """The guard is stopped or starved. Its end makes its tree ours; GuardGone follows."""
    return replace(keeper, take_over_at=inf), (KillGuard(),)


def _tree_gone(keeper: Keeper, event: TreeGone, now: float) -> Step:
    if keeper.lost_why is not None:
        return replace(keeper, state=State.ENDED), (CloseSession(), Exit())
    return _release(keeper, now)


def _note_session_ended(keeper: Keeper, event: SessionEnded, now: float) -> Step:
    return replace(keeper, lost_why=LostWhy.SESSION_ENDED), (RaiseShield(),)


def _report_unkillable(keeper: Keeper, event: DeadlinePassed, now: float) -> Step:
    return replace(keeper, reported_unkillable=True), (ReportUnkillable(),)


# When the batch is over


def _release(keeper: Keeper, now: float) -> Step:
    """Unlock; a check still under way is answered first, for a session answers in order."""
    keeper = replace(keeper, state=State.RELEASING, release_by=now + keeper.timing.check_timeout)
    return keeper, () if keeper.asked_at is not None else (SendUnlock(),)


def _release_asked(keeper: Keeper, event: ReleaseAsked, now: float) -> Step:
    return _release(keeper, now)


def _release_after_loss(keeper: Keeper, event: ReleaseAsked, now: float) -> Step:
    return _close(replace(keeper, was_held=False), now)


def _answered_before_unlock(keeper: Keeper, event: CheckAnswered, now: float) -> Step:
    return replace(keeper, asked_at=None), (SendUnlock(),)


def _unlock_answered(keeper: Keeper, event: UnlockAnswered, now: float) -> Step:
    return _close(replace(keeper, was_held=event.was_held), now)


def _session_ended_before_unlock(keeper: Keeper, event: SessionEnded, now: float) -> Step:
    return _close(replace(keeper, was_held=False), now)


def _close(keeper: Keeper, now: float) -> Step:
    if not keeper.guard_lives:
        return replace(keeper, state=State.ENDED), (CloseSession(), Exit())
    keeper = replace(keeper, state=State.CLOSED, release_by=now + keeper.timing.check_timeout)
    return keeper, (CloseSession(), TellUnlocked(keeper.was_held))


def _unlock_unanswered(keeper: Keeper, event: DeadlinePassed, now: float) -> Step:
    return _close(keeper, now)


def _guard_gone_while_releasing(keeper: Keeper, event: GuardGone, now: float) -> Step:
    return replace(keeper, guard_lives=False), ()


def _exit(keeper: Keeper, event: GuardGone, now: float) -> Step:
    return replace(keeper, state=State.ENDED, guard_lives=False), (Exit(),)


def _kill_lingering_guard(keeper: Keeper, event: DeadlinePassed, now: float) -> Step:
    """The guard was told and has nothing left to do, but is stopped."""
    return replace(keeper, release_by=inf), (KillGuard(),)


def _ignore(keeper: Keeper, event: Event, now: float) -> Step:
    return keeper, ()


IGNORED = _ignore

# Each handler takes just the event of its column, which the type of a dict cannot say.
TABLE: dict[State, dict[type, Callable[..., Step]]] = {
    State.HOLDING: {
        CheckAnswered: _answered,
        SessionEnded: _session_ended,
        ReleaseAsked: _release_asked,
        UnlockAnswered: IGNORED,
        GuardGone: _take_over,
        TreeGone: IGNORED,
        DeadlinePassed: _deadline_while_holding,
    },
    State.LOST: {
        CheckAnswered: _late_answer,
        SessionEnded: _session_ended_after_loss,
        ReleaseAsked: _release_after_loss,
        UnlockAnswered: IGNORED,
        GuardGone: _take_over,
        TreeGone: IGNORED,
        DeadlinePassed: _kill_late_guard,
    },
    State.TAKING_OVER: {
        CheckAnswered: _late_answer,
        SessionEnded: _note_session_ended,
        ReleaseAsked: IGNORED,
        UnlockAnswered: IGNORED,
        GuardGone: IGNORED,
        TreeGone: _tree_gone,
        DeadlinePassed: _report_unkillable,
    },
    State.RELEASING: {
        CheckAnswered: _answered_before_unlock,
        SessionEnded: _session_ended_before_unlock,
        ReleaseAsked: IGNORED,
        UnlockAnswered: _unlock_answered,
        GuardGone: _guard_gone_while_releasing,
        TreeGone: IGNORED,
        DeadlinePassed: _unlock_unanswered,
    },
    State.CLOSED: {
        CheckAnswered: IGNORED,
        SessionEnded: IGNORED,
        ReleaseAsked: IGNORED,
        UnlockAnswered: IGNORED,
        GuardGone: _exit,
        TreeGone: IGNORED,
        DeadlinePassed: _kill_lingering_guard,
    },
    State.ENDED: {
        CheckAnswered: IGNORED,
        SessionEnded: IGNORED,
        ReleaseAsked: IGNORED,
        UnlockAnswered: IGNORED,
        GuardGone: IGNORED,
        TreeGone: IGNORED,
        DeadlinePassed: IGNORED,
    },
}


# How it ended


@dataclass(frozen=True)
class Verdict:
    """How a run ended, as reported; `unlock_unanswered` when the server did not confirm that the lock is free."""

    ending: Ending
    unlock_unanswered: bool = False


def judge(
    keeper: Keeper,
    ending: Ending | None,
    now: float,
    *,
    held_s: float,
    processes: int = 0,
    stopped_s: float = 0.0,
    guard_ended_session: bool = False,
) -> Verdict:
    """Put together what the guard said of the end and what only the keeper saw.

    Args:
        keeper: the keeper at its end.
        ending: the guard's report; None when it died without one.
        now: the moment of the end.
        held_s: seconds since the lock was taken.
        processes: how many processes the keeper itself had to kill.
        stopped_s: for how long the keeper was not running just now; 0 when it was.
        guard_ended_session: whether the guard freed the lock, since we did not answer.
    """
    if keeper.took_over or ending is None:
        # The command itself was killed by the kernel, with the guard: one more than we saw.
        ending = replace(
            ending or Ending(),
            lost_why=keeper.lost_why or LostWhy.GUARD_DIED,
            held_s=held_s,
            processes=processes + 1,
            stop_took_s=0.0,
            needed_kill=True,
        )
    if ending.lost_why is LostWhy.SILENT and stopped_s:
        # The guard saw only silence: it was we who were stopped.
        ending = replace(ending, lost_why=LostWhy.SUSPENDED, suspended_s=stopped_s)
    if ending.held_s is None:
        ending = replace(ending, held_s=held_s)
    if ending.lost_why is not None or ending.child is None or guard_ended_session:
        return Verdict(ending)
    if keeper.was_held is False:
        unsure_s = ending.unsure_s or now - keeper.checked_at
        ending = replace(ending, lost_after_command=True, unsure_s=unsure_s)
    return Verdict(ending, unlock_unanswered=keeper.was_held is None)
