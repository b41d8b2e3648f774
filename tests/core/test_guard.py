"""The guard's state machine, stepped through every order of events.

A small world goes with the guard: whether its child and others of the tree live, whether the keeper
does. Everything that can happen in that world is tried at every point, at a few moments, until no
new state turns up; what must always be true is checked at each step.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from signal import SIGINT, SIGKILL, SIGTERM

import pytest

from batchguard.core import guard as g
from batchguard.core.exit_codes import ExitCode
from batchguard.core.outcome import ChildEnd, Ending, LostWhy
from batchguard.core.timing import Timing

TIMING = Timing(check_interval=2, check_timeout=4, kill_after=3, ttl=100)
HORIZON = 40.0


@dataclass(frozen=True)
class World:
    """What is really there, apart from what the guard believes."""

    child: bool = False
    others: int = 0
    keeper: bool = True
    acquired: bool = False
    spawned: bool = False
    asked: bool = False
    lost: bool = False
    signals: int = 0
    checks: int = 0
    slept: bool = False


def possible(world: World, guard: g.Guard, now: float) -> Iterator[tuple[g.Event, World, float]]:
    """Give everything that can happen next, what the world is then, and when."""
    if world.keeper and not world.acquired:
        yield g.LockAcquired(now), replace(world, acquired=True), now
        yield g.LockAcquired(now - 1, settle_s=5), replace(world, acquired=True), now
    if world.keeper and world.acquired and not world.lost:
        if world.checks < 2 and now + 3 < guard.deadline:
            yield g.LockChecked(now + 3), replace(world, checks=world.checks + 1), now + 3
        yield g.LockLost(LostWhy.SESSION_ENDED), replace(world, lost=True), now
    if world.keeper:
        yield g.KeeperLost(), replace(world, keeper=False), now
        if world.asked:
            yield g.Unlocked(True), world, now
            yield g.Unlocked(False), world, now
    if world.child:
        yield g.ChildExited(ChildEnd(exit=3)), replace(world, child=False), now
        yield g.ChildExited(ChildEnd(exit=0)), replace(world, child=False, others=0), now
        if not world.others:
            yield g.SpawnFailed(127), replace(world, child=False), now
    if world.others:
        yield (
            g.TreeCounted(in_group=0, in_tree=world.others - 1 + world.child),
            replace(world, others=world.others - 1),
            now,
        )
    if not world.child:
        yield g.TreeCounted(in_group=world.others, in_tree=world.others), world, now
    if world.signals < 1:
        yield g.SignalReceived(SIGTERM, relayed=bool(world.signals)), replace(world, signals=world.signals + 1), now
    if guard.deadline < inf:
        at = max(now, guard.deadline)
        yield g.DeadlinePassed(), world, at
        if not world.slept:
            yield g.DeadlinePassed(slept_s=20.0), replace(world, slept=True), at + 20.0


def explore(plan: g.Plan) -> int:
    """Try every order of events under a plan; give how many states were seen."""
    start = (g.Guard(plan=plan), World(), 0.0)
    queue = deque([start])
    seen = {start}
    while queue:
        guard, world, now = queue.popleft()
        for event, changed, at in possible(world, guard, now):
            if at > HORIZON:
                continue
            after, actions = g.step(guard, event, at)
            then = follow(changed, actions)
            check(guard, after, then, event, actions, at)
            state = (after, then, at)
            if state not in seen and after.state is not g.State.ENDED:
                seen.add(state)
                queue.append(state)
    return len(seen)


def follow(world: World, actions: tuple[g.Action, ...]) -> World:
    """Do to the world what the actions say."""
    for action in actions:
        match action:
            case g.SpawnChild():
                assert not world.spawned, "spawned twice"
                world = replace(world, child=True, others=1, spawned=True)
            case g.AskRelease():
                world = replace(world, asked=True)
    return world


def check(
    before: g.Guard, after: g.Guard, world: World, event: g.Event, actions: tuple[g.Action, ...], now: float
) -> None:
    """Check what must be true after every step."""
    kinds = [type(action) for action in actions]
    told = f"{before} --{event} at {now}--> {after} {actions}"
    if g.SpawnChild in kinds:
        assert now - after.checked_at <= TIMING.check_timeout, f"spawned on an old check: {told}"
        assert world.acquired, told
        assert not world.lost, f"spawned without the lock: {told}"
    if g.AskRelease in kinds or g.EndSession in kinds:
        assert not world.child, f"released under a living command: {told}"
    if after.state is g.State.ENDED:
        assert kinds[-1] is g.Exit or before.state is g.State.ENDED, told
        assert not world.child, f"left a living command: {told}"
    if world.child:
        lost = after.ending.lost_why is not None
        assert after.state in (g.State.RUNNING, g.State.STOPPING, g.State.KILLING), told
        if after.state is g.State.RUNNING:
            assert not lost, f"lost and not stopping: {told}"
            assert after.deadline <= TIMING.lock_deadline(after.checked_at), f"would act too late: {told}"
        if after.state is g.State.STOPPING and lost:
            latest = min(now, after.lock_deadline) + TIMING.kill_after
            assert after.deadline <= max(latest, now), f"would kill too late: {told}"
    if isinstance(event, g.LockLost | g.KeeperLost) and before.state is g.State.RUNNING:
        assert kinds in ([g.SignalTree], [g.KillTree]), f"a loss that kills nobody: {told}"
    if isinstance(event, g.DeadlinePassed):
        moved = after.state is not before.state or after.deadline > now
        assert moved, f"would come back at once for ever: {told}"


PLANS = [
    g.Plan(timing=TIMING, linger=linger, max_runtime=max_runtime, min_hold=min_hold, signal=signal)
    for linger, max_runtime, min_hold, signal in (
        (g.Linger.GROUP, inf, 0.0, SIGTERM),
        (g.Linger.ALL, 6.0, 0.0, SIGTERM),
        (g.Linger.NONE, inf, 7.0, SIGTERM),
        (g.Linger.GROUP, 6.0, 7.0, SIGTERM),
        (g.Linger.GROUP, 6.0, 0.0, SIGKILL),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: f"{plan.linger.value}-{plan.max_runtime}-{plan.min_hold}-{plan.signal}"
)
def test_every_order_of_events(plan: g.Plan) -> None:
    """In no order of events is the command spawned without the lock, outlived by the release, or left alone."""
    assert explore(plan) > 1000


def test_table_is_complete() -> None:
    """Every state names every event."""
    events = set(g.Event.__args__)
    assert set(g.TABLE) == set(g.State)
    assert all(set(row) == events for row in g.TABLE.values())


def running(**changes: object) -> g.Guard:
    """Give a guard whose command runs since moment 0."""
    guard, actions = g.step(g.Guard(plan=g.Plan(timing=TIMING, **changes)), g.LockAcquired(0.0), 0.0)  # type: ignore[arg-type]
    assert actions == (g.SpawnChild(),)
    return guard


def test_acts_at_the_deadline_of_the_lock() -> None:
    """Without another check, the guard acts at T + max(C, Q) + Q."""
    assert running().deadline == 8.0


def test_a_check_moves_the_deadline() -> None:
    """A good check that left at 3 is good until 3 + 8; an older one changes nothing."""
    guard, _ = g.step(running(), g.LockChecked(3.0), 3.5)
    assert guard.deadline == 11.0
    guard, _ = g.step(guard, g.LockChecked(1.0), 3.6)
    assert guard.deadline == 11.0


def test_kill_is_never_later_than_the_chain_allows() -> None:
    """Waking long after the deadline there is no grace: KILL at once."""
    guard, actions = g.step(running(), g.DeadlinePassed(slept_s=30.0), 30.0)
    assert actions == (g.KillTree(),)
    assert guard.ending.lost_why is LostWhy.SUSPENDED
    assert guard.ending.suspended_s == 30.0


def test_kill_signal_needs_no_grace() -> None:
    """--signal KILL kills at once."""
    _, actions = g.step(running(signal=SIGKILL), g.LockLost(LostWhy.UNLOCKED), 1.0)
    assert actions == (g.KillTree(),)


def test_loss_shortens_the_grace_of_a_time_limit() -> None:
    """A lock lost while --max-runtime is being enforced leaves at most a grace from then, and decides the code."""
    guard, _ = g.step(running(max_runtime=2.0), g.DeadlinePassed(), 2.0)
    assert guard.deadline == 5.0
    guard, _ = g.step(guard, g.LockLost(LostWhy.SESSION_ENDED), 4.0)
    assert guard.deadline == 5.0
    assert g.exit_code(guard.ending) == ExitCode.LOST


def test_unkillable_is_reported_once() -> None:
    """What a KILL did not end is named after a while, once, and the guard stays."""
    guard, _ = g.step(running(signal=SIGKILL), g.LockLost(LostWhy.UNLOCKED), 1.0)
    assert guard.deadline == 6.0
    guard, actions = g.step(guard, g.DeadlinePassed(), 6.0)
    assert actions == (g.ReportUnkillable(),)
    assert guard.deadline == inf


@pytest.mark.parametrize(
    ("arrivals", "forwarded"),
    [("d", 1), ("r", 1), ("dr", 1), ("rd", 1), ("dd", 2), ("rr", 2), ("drdr", 2), ("rrd", 2), ("d r", 2), ("dr r", 2)],
)
def test_a_signal_by_two_paths_is_forwarded_once(arrivals: str, forwarded: int) -> None:
    """d: straight to the guard, r: through the keeper; one signal to the whole group comes by both at once."""
    guard, sent, now = running(), 0, 1.0
    for arrival in arrivals:
        if arrival == " ":
            now += 2.0  # two signals, then
            continue
        guard, actions = g.step(guard, g.SignalReceived(SIGINT, relayed=arrival == "r"), now)
        sent += len(actions)
    assert sent == forwarded


def test_a_slow_network_does_not_keep_the_command_from_starting() -> None:
    """Where no answer is younger than an interval, the newest there can be is good enough; a stale one is not."""
    _, actions = g.step(g.Guard(plan=g.Plan(timing=TIMING)), g.LockAcquired(0.0), 3.0)
    assert actions == (g.SpawnChild(),)
    guard, actions = g.step(g.Guard(plan=g.Plan(timing=TIMING)), g.LockAcquired(0.0), 4.5)
    assert actions == ()
    _, actions = g.step(guard, g.LockChecked(3.0), 6.5)
    assert actions == (g.SpawnChild(),)


def test_a_loss_that_is_heard_of_before_the_lock() -> None:
    """A guard that was stopped may hear of both at once: nothing starts, and it counts as lost."""
    guard, actions = g.step(g.Guard(plan=g.Plan(timing=TIMING)), g.LockLost(LostWhy.SESSION_ENDED), 1.0)
    assert actions == ()
    guard, actions = g.step(guard, g.LockAcquired(0.9), 1.0)
    assert actions == (g.AskRelease(),)
    assert g.exit_code(guard.ending) == ExitCode.LOST


def test_min_hold_outlives_the_keeper() -> None:
    """With the keeper gone while the lock rests, the duplicate holds it for the rest of --min-hold."""
    guard, _ = g.step(running(linger=g.Linger.NONE, min_hold=120.0), g.ChildExited(ChildEnd(exit=0)), 1.0)
    guard, actions = g.step(guard, g.KeeperLost(), 2.0)
    assert (actions, guard.deadline) == ((), 120.0)
    _, actions = g.step(guard, g.DeadlinePassed(), 120.0)
    assert actions == (g.EndSession(), g.Exit())


def test_settles_until_a_fresh_check() -> None:
    """After settling, the command waits for a check that is younger than an interval."""
    guard, actions = g.step(g.Guard(plan=g.Plan(timing=TIMING)), g.LockAcquired(0.0, settle_s=5.0), 0.0)
    assert (actions, guard.deadline) == ((), 5.0)
    guard, actions = g.step(guard, g.DeadlinePassed(), 5.0)
    assert actions == ()
    guard, actions = g.step(guard, g.LockChecked(4.5), 5.1)
    assert actions == (g.SpawnChild(),)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (Ending(child=ChildEnd(exit=0)), 0),
        (Ending(child=ChildEnd(exit=255)), 255),
        (Ending(child=ChildEnd(signal=9)), 137),
        (Ending(child=ChildEnd(exit=0), lost_why=LostWhy.SILENT), 76),
        (Ending(child=ChildEnd(signal=15), max_runtime_over=True), 124),
        (Ending(child=ChildEnd(signal=15), max_runtime_over=True, lost_why=LostWhy.SILENT), 76),
        (Ending(spawn_failed=127), 127),
        (Ending(interrupted_by=2), 130),
        (Ending(child=ChildEnd(exit=5), lost_after_command=True), 5),
    ],
)
def test_exit_code_of_an_ending(ending: Ending, code: int) -> None:
    """What a run ended with decides its exit code, a loss before all else."""
    assert g.exit_code(ending) == code
