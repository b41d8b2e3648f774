"""The keeper's state machine, stepped through every order of events."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from batchguard.core import keeper as k
from batchguard.core.outcome import ChildEnd, Ending, LostWhy
from batchguard.core.timing import Timing

TIMING = Timing(check_interval=2, check_timeout=4, kill_after=3, ttl=100)
HORIZON = 30.0


@dataclass(frozen=True)
class World:
    """What is really there, apart from what the keeper believes."""

    guard: bool = True
    tree: bool = True
    session: bool = True
    asking: bool = False
    unlocking: bool = False
    asked_release: bool = False
    killing: bool = False
    closed: bool = False
    checks: int = 0
    slept: bool = False


def possible(world: World, keeper: k.Keeper, now: float) -> Iterator[tuple[k.Event, World, float]]:
    """Give everything that can happen next, what the world is then, and when."""
    if world.session and not world.closed:
        if world.asking:
            for held, primary in ((True, True), (False, True), (True, False)):
                if world.checks < 2:
                    yield k.CheckAnswered(held, primary), replace(world, asking=False, checks=world.checks + 1), now
        if world.unlocking:
            for was_held in (True, False):
                yield k.UnlockAnswered(was_held), replace(world, unlocking=False), now
        yield k.SessionEnded(), replace(world, session=False, asking=False, unlocking=False), now
    if world.guard and not world.asked_release:
        yield k.ReleaseAsked(), replace(world, tree=False, asked_release=True), now
    if world.guard:
        yield k.GuardGone(), replace(world, guard=False), now
    if world.killing and not world.guard:
        yield k.TreeGone(), replace(world, tree=False), now
    if keeper.deadline < inf:
        at = max(now, keeper.deadline)
        yield k.DeadlinePassed(), world, at
        if not world.slept:
            yield k.DeadlinePassed(slept_s=10.0), replace(world, slept=True), at + 10.0


def follow(world: World, actions: tuple[k.Action, ...]) -> World:
    """Do to the world what the actions say, and refuse what no world allows."""
    for action in actions:
        match action:
            case k.SendCheck() | k.SendUnlock() | k.LockAgain():
                assert world.session, f"{action} on a session that ended"
                assert not world.asking, f"{action} in the middle of a statement"
                world = replace(
                    world, asking=isinstance(action, k.SendCheck), unlocking=isinstance(action, k.SendUnlock)
                )
                if isinstance(action, k.SendUnlock):
                    assert not world.tree, "unlocked under a living tree"
            case k.CloseSession():
                assert not world.tree, "the session was ended under a living tree"
                assert not world.closed, "closed twice"
                world = replace(world, closed=True)
            case k.KillTree():
                assert not world.guard, "took over from a living guard"
                world = replace(world, killing=True)
    return world


def test_every_order_of_events() -> None:
    """In no order of events does the keeper end the session, or unlock, before the tree is dead."""
    start = (k.start_keeper(TIMING, 0.0), World(), 0.0)
    queue = deque([start])
    seen = {start}
    while queue:
        keeper, world, now = queue.popleft()
        for event, changed, at in possible(world, keeper, now):
            if at > HORIZON:
                continue
            after, actions = k.step(keeper, event, at)
            told = f"{keeper} --{event} at {at}--> {after} {actions}"
            try:
                then = follow(changed, actions)
            except AssertionError as error:
                raise AssertionError(f"{error}: {told}") from None
            if isinstance(event, k.DeadlinePassed):
                assert after.state is not keeper.state or after.deadline > at, f"would come back at once: {told}"
            if after.state is k.State.ENDED:
                assert k.Exit() in actions or keeper.state is k.State.ENDED, told
                assert then.closed, f"left with the session open: {told}"
                assert not then.guard, f"left a guard behind: {told}"
                continue
            state = (after, then, at)
            if state not in seen:
                seen.add(state)
                queue.append(state)
    assert len(seen) > 500


def test_table_is_complete() -> None:
    """Every state names every event."""
    events = set(k.Event.__args__)
    assert set(k.TABLE) == set(k.State)
    assert all(set(row) == events for row in k.TABLE.values())


def test_checks_follow_each_other() -> None:
    """The next check leaves an interval after the last, or with its answer, whichever is later."""
    keeper = k.start_keeper(TIMING, 0.0)
    assert keeper.deadline == 2.0
    keeper, actions = k.step(keeper, k.DeadlinePassed(), 2.0)
    assert actions == (k.SendCheck(),)
    assert keeper.deadline == 6.0  # its whole patience
    keeper, actions = k.step(keeper, k.CheckAnswered(held=True, primary=True), 5.5)
    assert actions == (k.PublishCheck(2.0),)  # what counts is when the question left
    assert keeper.deadline == 4.0  # due already: at once


def test_silence_is_a_loss_after_the_whole_patience() -> None:
    """A check unanswered for its timeout: the guard is told; the keeper takes over if nothing follows."""
    keeper, _ = k.step(k.start_keeper(TIMING, 0.0), k.DeadlinePassed(), 2.0)
    keeper, actions = k.step(keeper, k.DeadlinePassed(), 6.0)
    assert actions == (k.TellLost(LostWhy.SILENT),)
    assert keeper.deadline == 6.0 + 3.0 + k.GUARD_IS_LATE
    keeper, actions = k.step(keeper, k.DeadlinePassed(), keeper.deadline)
    assert actions == (k.KillGuard(),)


def test_guard_is_told_before_the_shield_is_raised() -> None:
    """The kill does not wait for the shield."""
    _, actions = k.step(k.start_keeper(TIMING, 0.0), k.SessionEnded(), 1.0)
    assert actions == (k.TellLost(LostWhy.SESSION_ENDED), k.RaiseShield())


def test_a_standby_and_a_vanished_lock() -> None:
    """Each bad answer has its reason."""
    keeper, _ = k.step(k.start_keeper(TIMING, 0.0), k.DeadlinePassed(), 2.0)
    _, actions = k.step(keeper, k.CheckAnswered(held=True, primary=False), 2.1)
    assert actions == (k.TellLost(LostWhy.NOT_PRIMARY), k.RaiseShield())
    _, actions = k.step(keeper, k.CheckAnswered(held=False, primary=True), 2.1)
    assert actions == (k.TellLost(LostWhy.UNLOCKED), k.LockAgain())


DONE = Ending(child=ChildEnd(exit=3))


def test_verdict_of_a_run_that_ended_well() -> None:
    """Unlocked and held until then: as the guard said, with how long the lock was held."""
    keeper = replace(k.start_keeper(TIMING, 0.0), was_held=True)
    assert k.judge(keeper, DONE, 9.0, held_s=8.0) == k.Verdict(replace(DONE, held_s=8.0))


def test_verdict_of_a_lock_that_was_gone_already() -> None:
    """Lost before the unlock: unsure since the last good check; not when the guard itself freed it."""
    keeper = replace(k.start_keeper(TIMING, 2.0), was_held=False)
    ending = k.judge(keeper, DONE, 9.0, held_s=8.0).ending
    assert (ending.lost_after_command, ending.unsure_s, ending.lost_why) == (True, 7.0, None)
    assert not k.judge(keeper, DONE, 9.0, held_s=8.0, guard_ended_session=True).ending.lost_after_command


def test_verdict_without_an_answer_to_the_unlock() -> None:
    """Neither held nor lost: it is said that the server did not answer."""
    assert k.judge(k.start_keeper(TIMING, 2.0), DONE, 9.0, held_s=8.0).unlock_unanswered


def test_verdict_of_a_run_whose_guard_died() -> None:
    """Without a guard's report the keeper's own knowledge counts; a loss before it is the cause."""
    keeper = replace(k.start_keeper(TIMING, 0.0), took_over=True, was_held=True)
    ending = k.judge(keeper, None, 9.0, held_s=8.0, processes=3).ending
    assert (ending.lost_why, ending.processes) == (LostWhy.GUARD_DIED, 4)
    lost = replace(keeper, lost_why=LostWhy.SESSION_ENDED)
    assert k.judge(lost, None, 9.0, held_s=8.0).ending.lost_why is LostWhy.SESSION_ENDED


def test_verdict_of_a_keeper_that_was_stopped() -> None:
    """What the guard took for silence was our own sleep."""
    silent = Ending(child=ChildEnd(signal=15), lost_why=LostWhy.SILENT, held_s=5.0)
    ending = k.judge(k.start_keeper(TIMING, 0.0), silent, 99.0, held_s=98.0, stopped_s=90.0).ending
    assert (ending.lost_why, ending.suspended_s, ending.held_s) == (LostWhy.SUSPENDED, 90.0, 5.0)
    assert k.judge(k.start_keeper(TIMING, 0.0), silent, 99.0, held_s=98.0).ending == silent
