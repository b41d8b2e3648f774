"""The guard's policy: what happened, and what must follow.

Two rules, which everything below serves:

1. The command's tree is dead before anybody else can hold the lock. The guard therefore never waits
   for an answer before it kills: a lock not confirmed by its deadline counts as lost.
2. The lock is given back only when the batch is over, and then at once.

`step` is pure: the loop in `runtime/guard.py` tells it what happened and when, and does what it
answers. Events are in the past tense, actions in the imperative. Moments are seconds of
CLOCK_BOOTTIME. `TABLE` names, for every state, what each event leads to; an event that can do
nothing in a state is written there as IGNORED.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import inf
from signal import SIGKILL, SIGTERM

from batchguard.core.exit_codes import ExitCode, exit_code_of_signal
from batchguard.core.outcome import ChildEnd, Ending, LostWhy
from batchguard.core.timing import KILL_TAKES_EFFECT, Timing

SUSPENDED_AFTER = 2.5
"""The loop wakes at least once a second; one that slept longer than this was stopped, or its machine was."""


SAME_SIGNAL = 1.0
"""Seconds within which a signal to a whole process group has surely come by both paths."""

KEEPER_IS_LATE = 1.0
"""How long after its own patience with the server the keeper still counts as alive."""


class Linger(Enum):
    """What the batch still is when the command itself has ended (`--wait-descendants`)."""

    GROUP = "group"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True)
class Plan:
    """What the user asked of this run; durations in seconds."""

    timing: Timing = field(default_factory=Timing)
    signal: int = SIGTERM
    linger: Linger = Linger.GROUP
    max_runtime: float = inf
    min_hold: float = 0.0


# Events


@dataclass(frozen=True)
class LockAcquired:
    """The keeper holds the lock, and the guard a duplicate of its socket; `settle_s` is yet to be waited."""

    checked_at: float
    settle_s: float = 0.0


@dataclass(frozen=True)
class LockChecked:
    """The server confirmed the lock; the question left at `checked_at`."""

    checked_at: float


@dataclass(frozen=True)
class LockLost:
    """The keeper learnt that the lock is no longer held, or can no longer be confirmed."""

    why: LostWhy


@dataclass(frozen=True)
class KeeperLost:
    """The keeper is gone; the duplicate of the socket is now all that holds the lock."""


@dataclass(frozen=True)
class SpawnFailed:
    """The command could not be started; `exit_code` is 126 or 127, `why` the system's reason."""

    exit_code: int
    why: str = ""


@dataclass(frozen=True)
class ChildExited:
    """The command itself ended; others of its tree may live."""

    end: ChildEnd


@dataclass(frozen=True)
class TreeCounted:
    """So many processes of the command's group, and of its whole tree, are alive."""

    in_group: int
    in_tree: int


@dataclass(frozen=True)
class SignalReceived:
    """A signal reached us: `relayed` when it came to the keeper, who passed it on."""

    number: int
    relayed: bool = False


@dataclass(frozen=True)
class Unlocked:
    """The keeper answered: True unlocked, False the lock was gone already, None the server kept silent."""

    was_held: bool | None


@dataclass(frozen=True)
class DeadlinePassed:
    """The guard's deadline is over; `slept_s` is how long the loop was away."""

    slept_s: float = 0.0


Event = (
    LockAcquired
    | LockChecked
    | LockLost
    | KeeperLost
    | SpawnFailed
    | ChildExited
    | TreeCounted
    | SignalReceived
    | Unlocked
    | DeadlinePassed
)


# Actions


@dataclass(frozen=True)
class SpawnChild:
    """Start the command."""


@dataclass(frozen=True)
class ForwardSignal:
    """Send the signal to the command's process group."""

    number: int


@dataclass(frozen=True)
class SignalTree:
    """Send the signal to every process of the tree, and CONT after it, so that a stopped one acts."""

    number: int


@dataclass(frozen=True)
class KillTree:
    """Send KILL to every process of the tree, again and again until none is left."""


@dataclass(frozen=True)
class ReportUnkillable:
    """Name the processes that a KILL did not end; the lock stays held."""


@dataclass(frozen=True)
class AskRelease:
    """Tell the keeper that the batch is over and how, so that it unlocks."""


@dataclass(frozen=True)
class EndSession:
    """Shut the duplicate of the socket down: the server then frees the lock though the keeper cannot."""


@dataclass(frozen=True)
class Exit:
    """Leave."""


Action = SpawnChild | ForwardSignal | SignalTree | KillTree | ReportUnkillable | AskRelease | EndSession | Exit


class State(Enum):
    """Where a run stands."""

    WAITING = auto()  # the keeper does not hold the lock yet
    SETTLING = auto()  # held; an old holder may still be dying
    RUNNING = auto()  # the command lives
    LINGERING = auto()  # the command ended, the rest of its batch did not
    STOPPING = auto()  # signalled; the grace runs
    KILLING = auto()  # KILL until nothing is left
    RESTING = auto()  # over; the lock is kept for --min-hold
    RELEASING = auto()  # the keeper was asked to unlock
    ENDED = auto()


@dataclass(frozen=True)
class SignalCopy:
    """A signal that was forwarded, and by which path it had come; its twin may follow by the other."""

    number: int
    relayed: bool
    at: float


@dataclass(frozen=True)
class Guard:
    """All that the guard knows; `deadline` is the next moment at which it must act by itself."""

    plan: Plan = field(default_factory=Plan)
    state: State = State.WAITING
    deadline: float = inf
    checked_at: float = -inf
    locked_at: float = -inf
    settle_until: float = -inf
    spawned_at: float = inf
    stopping_since: float = inf
    kill_at: float = inf
    asked_at: float = inf
    keeper_lives: bool = True
    killed: bool = False
    reported_unkillable: bool = False
    ending: Ending = field(default_factory=Ending)
    recent_signals: tuple[SignalCopy, ...] = ()

    @property
    def lock_deadline(self) -> float:
        """The moment from which the lock no longer counts as held."""
        return self.plan.timing.lock_deadline(self.checked_at)


Step = tuple[Guard, tuple[Action, ...]]


def step(guard: Guard, event: Event, now: float) -> Step:
    """Give the guard after `event` at `now`, and what to do, in this order."""
    after, actions = TABLE[guard.state][type(event)](guard, event, now)
    return replace(after, deadline=_deadline(after, now)), actions


def _deadline(guard: Guard, now: float) -> float:
    """Give the one moment at which DeadlinePassed is due; never one that has been acted on."""
    timing = guard.plan.timing
    match guard.state:
        case State.SETTLING:
            return min(guard.settle_until if guard.settle_until > now else inf, guard.lock_deadline)
        case State.RUNNING | State.LINGERING:
            return min(guard.lock_deadline, guard.spawned_at + guard.plan.max_runtime)
        case State.STOPPING:
            return min(guard.kill_at, guard.lock_deadline if guard.ending.lost_why is None else inf)
        case State.KILLING:
            return inf if guard.reported_unkillable else guard.kill_at + KILL_TAKES_EFFECT
        case State.RESTING:
            unchecked = inf if not guard.keeper_lives else guard.lock_deadline  # nobody checks any more, nobody unlocks
            return min(guard.locked_at + guard.plan.min_hold, unchecked)
        case State.RELEASING:
            return guard.asked_at + timing.check_timeout + KEEPER_IS_LATE
        case State.WAITING | State.ENDED:
            return inf


# What may happen before the command starts


def _lost_before_held(guard: Guard, event: LockLost, now: float) -> Step:
    """The news of a loss are always heard before those of the lock, when a stopped guard wakes to both."""
    return replace(guard, ending=replace(guard.ending, lost_why=event.why, held_s=0.0)), ()


def _acquire(guard: Guard, event: LockAcquired, now: float) -> Step:
    held = replace(
        guard,
        state=State.SETTLING,
        checked_at=event.checked_at,
        locked_at=now,
        settle_until=now + event.settle_s,
    )
    if held.ending.lost_why is not None:
        return _release(held, now)
    return _spawn_when_due(held, now, _longest_answer(guard))


def _longest_answer(guard: Guard) -> float:
    return max(guard.plan.timing.check_interval, guard.plan.timing.check_timeout)


def _spawn_when_due(guard: Guard, now: float, oldest: float) -> Step:
    """Start the command once settled, and only on a check that is not older than `oldest` seconds.

    That is an interval, but for a check whose answer has just come: over a slow network no answer
    is younger than an interval.
    """
    if now < guard.settle_until or now - guard.checked_at > oldest:
        return guard, ()
    return replace(guard, state=State.RUNNING, spawned_at=now), (SpawnChild(),)


def _check_while_settling(guard: Guard, event: LockChecked, now: float) -> Step:
    return _spawn_when_due(_note_check(guard, event), now, _longest_answer(guard))


def _deadline_while_settling(guard: Guard, event: DeadlinePassed, now: float) -> Step:
    if now >= guard.lock_deadline:
        return _release(_note_loss(guard, _why_silent(event), now, event.slept_s), now)
    return _spawn_when_due(guard, now, guard.plan.timing.check_interval)


def _lost_while_settling(guard: Guard, event: LockLost, now: float) -> Step:
    return _release(_note_loss(guard, event.why, now), now)


def _interrupt_before_start(guard: Guard, event: SignalReceived, now: float) -> Step:
    guard = replace(guard, ending=replace(guard.ending, interrupted_by=event.number))
    return _release(guard, now)


def _leave(guard: Guard, event: KeeperLost, now: float) -> Step:
    return replace(guard, state=State.ENDED, keeper_lives=False), (EndSession(), Exit())


def _keeper_lost_while_settling(guard: Guard, event: KeeperLost, now: float) -> Step:
    return _leave(_note_loss(guard, LostWhy.KEEPER_DIED, now), event, now)


def _spawn_failed(guard: Guard, event: SpawnFailed, now: float) -> Step:
    return _release(
        replace(guard, ending=replace(guard.ending, spawn_failed=event.exit_code, spawn_error=event.why)), now
    )


# While the batch lives


def _note_check(guard: Guard, event: LockChecked) -> Guard:
    return replace(guard, checked_at=max(guard.checked_at, event.checked_at))


def _checked(guard: Guard, event: LockChecked, now: float) -> Step:
    return _note_check(guard, event), ()


def _forward(guard: Guard, event: SignalReceived, now: float) -> Step:
    """Pass a signal on once, though one sent to a whole group comes by two paths: straight, and from the keeper.

    The second of two that came by different paths within a moment is the same one.
    """
    recent = [copy for copy in guard.recent_signals if now - copy.at <= SAME_SIGNAL]
    for copy in recent:
        if copy.number == event.number and copy.relayed is not event.relayed:
            recent.remove(copy)
            return replace(guard, recent_signals=tuple(recent)), ()
    recent.append(SignalCopy(event.number, event.relayed, now))
    return replace(guard, recent_signals=tuple(recent)), (ForwardSignal(event.number),)


def _child_exited(guard: Guard, event: ChildExited, now: float) -> Step:
    """The command itself is over; TreeCounted tells when the rest of its batch is."""
    guard = _note_child(guard, event)
    if guard.plan.linger is Linger.NONE:
        return _rest(guard, now)
    return replace(guard, state=State.LINGERING), ()


def _note_child(guard: Guard, event: ChildExited) -> Guard:
    return replace(guard, ending=replace(guard.ending, child=event.end))


def _child_exited_while_stopping(guard: Guard, event: ChildExited, now: float) -> Step:
    return _note_child(guard, event), ()


def _counted_while_lingering(guard: Guard, event: TreeCounted, now: float) -> Step:
    left = event.in_group if guard.plan.linger is Linger.GROUP else event.in_tree
    return (guard, ()) if left else _rest(guard, now)


def _deadline_while_running(guard: Guard, event: DeadlinePassed, now: float) -> Step:
    if now >= guard.lock_deadline:
        return _stop(_note_loss(guard, _why_silent(event), now, event.slept_s), now)
    if now >= guard.spawned_at + guard.plan.max_runtime:
        return _stop(replace(guard, ending=replace(guard.ending, max_runtime_over=True)), now)
    return guard, ()


def _lost_while_running(guard: Guard, event: LockLost, now: float) -> Step:
    return _stop(_note_loss(guard, event.why, now), now)


def _keeper_lost_while_running(guard: Guard, event: KeeperLost, now: float) -> Step:
    return _stop(_note_loss(replace(guard, keeper_lives=False), LostWhy.KEEPER_DIED, now), now)


def _why_silent(event: DeadlinePassed) -> LostWhy:
    return LostWhy.SUSPENDED if event.slept_s > SUSPENDED_AFTER else LostWhy.SILENT


def _note_loss(guard: Guard, why: LostWhy, now: float, slept_s: float = 0.0) -> Guard:
    """Keep the first reason for a loss; what follows it (a keeper that dies too) is not the cause."""
    if guard.ending.lost_why is not None:
        return guard
    ending = replace(
        guard.ending,
        lost_why=why,
        held_s=now - guard.locked_at,
        suspended_s=slept_s if why is LostWhy.SUSPENDED else None,
    )
    return replace(guard, ending=ending)


def _latest_kill(guard: Guard, now: float) -> float:
    """Give the moment of the KILL: a grace from now, but never later than the chain allows.

    A machine that wakes long after its deadline has no grace left.
    """
    return min(now, guard.lock_deadline) + guard.plan.timing.kill_after


def _stop(guard: Guard, now: float) -> Step:
    """Signal the tree and let the grace run; at once KILL where no grace is left or wanted."""
    guard = replace(guard, stopping_since=now, kill_at=_latest_kill(guard, now))
    if guard.plan.signal == SIGKILL or now >= guard.kill_at:
        return _kill(guard, now)
    return replace(guard, state=State.STOPPING), (SignalTree(guard.plan.signal),)


def _kill(guard: Guard, now: float) -> Step:
    return replace(guard, state=State.KILLING, kill_at=now, killed=True), (KillTree(),)


def _lost_while_stopping(guard: Guard, event: LockLost, now: float) -> Step:
    """A time limit was being enforced; a loss may leave less grace."""
    guard = _note_loss(guard, event.why, now)
    return replace(guard, kill_at=min(guard.kill_at, _latest_kill(guard, now))), ()


def _keeper_lost_while_stopping(guard: Guard, event: KeeperLost, now: float) -> Step:
    guard = replace(guard, keeper_lives=False)
    return _lost_while_stopping(guard, LockLost(LostWhy.KEEPER_DIED), now)


def _deadline_while_stopping(guard: Guard, event: DeadlinePassed, now: float) -> Step:
    if now >= guard.kill_at:
        return _kill(guard, now)
    if now >= guard.lock_deadline and guard.ending.lost_why is None:
        return _lost_while_stopping(guard, LockLost(_why_silent(event)), now)
    return guard, ()


def _lost_while_killing(guard: Guard, event: LockLost, now: float) -> Step:
    return _note_loss(guard, event.why, now), ()


def _keeper_lost_while_killing(guard: Guard, event: KeeperLost, now: float) -> Step:
    return _note_loss(replace(guard, keeper_lives=False), LostWhy.KEEPER_DIED, now), ()


def _counted_while_stopping(guard: Guard, event: TreeCounted, now: float) -> Step:
    if event.in_tree or guard.ending.child is None:
        return guard, ()
    ending = replace(guard.ending, stop_took_s=now - guard.stopping_since, needed_kill=guard.killed)
    guard = replace(guard, ending=ending)
    return _release(guard, now) if ending.lost_why is not None else _rest(guard, now)


def _deadline_while_killing(guard: Guard, event: DeadlinePassed, now: float) -> Step:
    return replace(guard, reported_unkillable=True), (ReportUnkillable(),)


# When the batch is over


def _rest(guard: Guard, now: float) -> Step:
    """Keep the lock until --min-hold is over, if it is not."""
    if now < guard.locked_at + guard.plan.min_hold:
        return replace(guard, state=State.RESTING), ()
    return _release(guard, now)


def _loss_while_resting(guard: Guard, event: LockLost, now: float) -> Step:
    return _release(_note_late_loss(guard, now), now)


def _note_late_loss(guard: Guard, now: float) -> Guard:
    ending = replace(guard.ending, lost_after_command=True, unsure_s=now - guard.checked_at)
    return replace(guard, ending=ending)


def _keeper_lost_while_resting(guard: Guard, event: KeeperLost, now: float) -> Step:
    """The duplicate still holds the lock; keep it for what is left of --min-hold."""
    return replace(guard, keeper_lives=False), ()


def _deadline_while_resting(guard: Guard, event: DeadlinePassed, now: float) -> Step:
    if now >= guard.lock_deadline and guard.keeper_lives:
        return _release(_note_late_loss(guard, now), now)
    return _release(guard, now)


def _interrupt_rest(guard: Guard, event: SignalReceived, now: float) -> Step:
    return _release(guard, now)


def _release(guard: Guard, now: float) -> Step:
    """Ask the keeper to unlock; without one, end the session ourselves."""
    if not guard.keeper_lives:
        return replace(guard, state=State.ENDED), (EndSession(), Exit())
    return replace(guard, state=State.RELEASING, asked_at=now), (AskRelease(),)


def _unlocked(guard: Guard, event: Unlocked, now: float) -> Step:
    return replace(guard, state=State.ENDED), (Exit(),)


def _deadline_while_releasing(guard: Guard, event: DeadlinePassed, now: float) -> Step:
    """The keeper is stopped or stuck: free the lock without it. It ends with our report once it goes on."""
    return replace(guard, state=State.ENDED), (EndSession(), Exit())


def _ignore(guard: Guard, event: Event, now: float) -> Step:
    return guard, ()


IGNORED = _ignore

# Each handler takes just the event of its column, which the type of a dict cannot say.
TABLE: dict[State, dict[type, Callable[..., Step]]] = {
    State.WAITING: {
        LockAcquired: _acquire,
        LockChecked: IGNORED,
        LockLost: _lost_before_held,
        KeeperLost: _leave,
        SpawnFailed: IGNORED,
        ChildExited: IGNORED,
        TreeCounted: IGNORED,
        SignalReceived: _interrupt_before_start,
        Unlocked: IGNORED,
        DeadlinePassed: IGNORED,
    },
    State.SETTLING: {
        LockAcquired: IGNORED,
        LockChecked: _check_while_settling,
        LockLost: _lost_while_settling,
        KeeperLost: _keeper_lost_while_settling,
        SpawnFailed: _spawn_failed,
        ChildExited: IGNORED,
        TreeCounted: IGNORED,
        SignalReceived: _interrupt_before_start,
        Unlocked: IGNORED,
        DeadlinePassed: _deadline_while_settling,
    },
    State.RUNNING: {
        LockAcquired: IGNORED,
        LockChecked: _checked,
        LockLost: _lost_while_running,
        KeeperLost: _keeper_lost_while_running,
        SpawnFailed: _spawn_failed,
        ChildExited: _child_exited,
        TreeCounted: IGNORED,
        SignalReceived: _forward,
        Unlocked: IGNORED,
        DeadlinePassed: _deadline_while_running,
    },
    State.LINGERING: {
        LockAcquired: IGNORED,
        LockChecked: _checked,
        LockLost: _lost_while_running,
        KeeperLost: _keeper_lost_while_running,
        SpawnFailed: IGNORED,
        ChildExited: IGNORED,
        TreeCounted: _counted_while_lingering,
        SignalReceived: _forward,
        Unlocked: IGNORED,
        DeadlinePassed: _deadline_while_running,
    },
    State.STOPPING: {
        LockAcquired: IGNORED,
        LockChecked: _checked,
        LockLost: _lost_while_stopping,
        KeeperLost: _keeper_lost_while_stopping,
        SpawnFailed: _spawn_failed,
        ChildExited: _child_exited_while_stopping,
        TreeCounted: _counted_while_stopping,
        SignalReceived: _forward,
        Unlocked: IGNORED,
        DeadlinePassed: _deadline_while_stopping,
    },
    State.KILLING: {
        LockAcquired: IGNORED,
        LockChecked: _checked,
        LockLost: _lost_while_killing,
        KeeperLost: _keeper_lost_while_killing,
        SpawnFailed: _spawn_failed,
        ChildExited: _child_exited_while_stopping,
        TreeCounted: _counted_while_stopping,
        SignalReceived: IGNORED,
        Unlocked: IGNORED,
        DeadlinePassed: _deadline_while_killing,
    },
    State.RESTING: {
        LockAcquired: IGNORED,
        LockChecked: _checked,
        LockLost: _loss_while_resting,
        KeeperLost: _keeper_lost_while_resting,
        SpawnFailed: IGNORED,
        ChildExited: IGNORED,
        TreeCounted: IGNORED,
        SignalReceived: _interrupt_rest,
        Unlocked: IGNORED,
        DeadlinePassed: _deadline_while_resting,
    },
    State.RELEASING: {
        LockAcquired: IGNORED,
        LockChecked: IGNORED,
        LockLost: IGNORED,  # the keeper reports it with the unlock
        KeeperLost: _leave,
        SpawnFailed: IGNORED,
        ChildExited: IGNORED,
        TreeCounted: IGNORED,
        SignalReceived: IGNORED,
        Unlocked: _unlocked,
        DeadlinePassed: _deadline_while_releasing,
    },
    State.ENDED: {
        LockAcquired: IGNORED,
        LockChecked: IGNORED,
        LockLost: IGNORED,
        KeeperLost: IGNORED,
        SpawnFailed: IGNORED,
        ChildExited: IGNORED,
        TreeCounted: IGNORED,
        SignalReceived: IGNORED,
        Unlocked: IGNORED,
        DeadlinePassed: IGNORED,
    },
}


def exit_code(ending: Ending) -> int:
    """Give the exit code that a run's ending leads to."""
    if ending.lost_why is not None:
        return ExitCode.LOST
    if ending.max_runtime_over:
        return ExitCode.TIME_LIMIT
    if ending.spawn_failed is not None:
        return ending.spawn_failed
    if ending.child is None:
        return exit_code_of_signal(ending.interrupted_by) if ending.interrupted_by else ExitCode.SOFTWARE
    return ending.child.exit_code
