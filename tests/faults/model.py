"""The protocol as a model: the real `step` functions of guard and keeper, in a world that tries everything.

Host A's keeper has just got the lock and told its guard. A server, a network that may delay every message for ever, a
second host B that wants the same lock, and faults of A's processes take every turn they can. The
search visits every state that can be reached until A's tree is dead, and measures how long B's
command and A's tree live at once. A tree that is dead, or will never be, can do no harm any more:
such states are not followed.

Time is counted in whole seconds. A process that is not faulty does its work within the second in
which it falls due; when within it, and in which order, is tried out.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf
from typing import Generic, NamedTuple, TypeVar

from batchguard.core import guard as g
from batchguard.core import keeper as k
from batchguard.core.outcome import ChildEnd, Ending, LostWhy
from batchguard.core.settle import ServerAge, Settle, decide_settle
from batchguard.core.timing import KILL_TAKES_EFFECT, Timing

Machine = TypeVar("Machine", g.Guard, k.Keeper)

KILL_TAKES = int(KILL_TAKES_EFFECT - ceil(k.GUARD_IS_LATE))
"""Seconds until a KILL has emptied the tree at the latest; what the keeper is late for comes out of the same 5 s."""

GONE = -1
"""The number of a machine that is dead, or of B's while it has no lock."""


@dataclass(frozen=True)
class Bounds:
    """What may happen in one search, and how often."""

    timing: Timing
    settle: Settle = "off"
    reckoned: Timing | None = None  # what B takes for A's timing; None: what it is
    client_timeout: float = inf  # after so long without an acknowledgement A's kernel resets the connection
    prompt: bool = False  # the network brings A the server's messages within a second
    keeper_blocks: bool = False  # a keeper that waits for an answer and for nothing else
    deaths: int = 1  # kill -9 of a process of A
    pauses: int = 2  # STOP of a process of A, for any time
    faults_at_once: int = 1
    terminations: int = 0  # of A's backend alone: pg_terminate_backend, or a reset that only the server saw
    unlocks: int = 0  # of A's lock behind its back
    restarts: int = 0  # of the server

    @property
    def stale(self) -> float:
        """A moment so long ago that nothing distinguishes it from an earlier one."""
        return -(self.timing.longest_silence + self.timing.kill_after + 1)


class World(NamedTuple):
    """Everything there is. Moments are seconds from now, so that equal situations are equal states."""

    guard: int
    keeper: int
    guard_paused: bool = False
    keeper_paused: bool = False
    keeper_told: bool = False  # the guard knows that the keeper is dead
    held: float | None = 0.0  # the keeper's word that the lock is held, not heard by the guard yet: when it was checked
    tree: bool = False  # A's command was started, and something of it lives
    over: bool = False  # A's command will never be started
    mark: float = 0.0  # the last good check that the keeper has published
    to_guard: tuple[LostWhy, ...] = ()
    up: tuple[tuple[str, float], ...] = ()  # from A to the server, with the moment of sending where that matters
    down: tuple[k.Event, ...] = ()  # from the server to A
    session: bool = True  # A's backend lives
    holder: str = "A"
    heard: float = 0.0  # when the server got the last packet from A
    shield: bool = False  # wanted, and not up yet
    kill_left: float = inf  # seconds of killing that the tree survives at most
    command: bool = True  # the command itself lives; the rest of its tree does in any case
    other: int = GONE  # B's guard, once B holds the lock
    b_runs: bool = False  # B's command was started
    overlap: int = -1  # seconds since both A's tree and B's command live
    restarted: float = -inf
    deaths: int = 0
    pauses: int = 0
    terminations: int = 0
    unlocks: int = 0
    restarts: int = 0


@dataclass(frozen=True)
class Found:
    """What a search found: states visited, and the longest overlap (seconds, None when there was none) with its way."""

    states: int
    longest: int | None
    way: tuple[str, ...]


class _Numbered(Generic[Machine]):
    """Gives equal machines the same number: a world is then a tuple of plain values, which is quick to compare."""

    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self.numbers: dict[Machine, int] = {}

    def number(self, machine: Machine) -> int:
        if machine not in self.numbers:
            self.numbers[machine] = len(self.machines)
            self.machines.append(machine)
        return self.numbers[machine]


@dataclass
class Search:
    """One search; `stop_at` ends it at the first overlap of that many seconds."""

    bounds: Bounds
    stop_at: float = inf
    guards: _Numbered[g.Guard] = field(default_factory=_Numbered)
    keepers: _Numbered[k.Keeper] = field(default_factory=_Numbered)

    def __post_init__(self) -> None:
        """Remember what each machine does on each event: there are far fewer of these than worlds."""
        self.step_guard = lru_cache(maxsize=None)(self._step_guard)
        self.step_keeper = lru_cache(maxsize=None)(self._step_keeper)
        self.age_guard = lru_cache(maxsize=None)(self._age_guard)
        self.age_keeper = lru_cache(maxsize=None)(self._age_keeper)

    def run(self) -> Found:
        """Visit every state within the bounds."""
        start = self._start()
        came: dict[World, tuple[World, str] | None] = {start: None}
        queue = deque([start])
        worst: World | None = None
        while queue:
            world = queue.popleft()
            if world.overlap > (worst.overlap if worst else -1):
                worst = world
                if worst.overlap >= self.stop_at:
                    break
            for name, after in self._next(world):
                if not after.over and after not in came:
                    came[after] = (world, name)
                    queue.append(after)
        way: list[str] = []
        at = worst
        while at is not None and (step := came[at]) is not None:
            at, name = step
            way.append(name)
        return Found(len(came), worst.overlap if worst else None, tuple(reversed(way)))

    def _start(self) -> World:
        """A's lock was checked just now, and its guard is about to hear of it."""
        guard = g.Guard(plan=g.Plan(timing=self.bounds.timing))
        return World(self.guards.number(guard), self.keepers.number(k.start_keeper(self.bounds.timing, 0.0)))

    def _settle(self, wait_s: float) -> tuple[int, tuple[g.Action, ...]]:
        guard = g.Guard(plan=g.Plan(timing=self.bounds.timing))
        after, actions = g.step(guard, g.LockAcquired(0.0, wait_s), 0.0)
        return self.guards.number(_plain(after)), actions

    def _next(self, world: World) -> Iterator[tuple[str, World]]:
        """Give everything that can happen next."""
        yield from self._processes(world)
        yield from self._faults(world)
        yield from self._network(world)
        yield from self._server(world)
        if world.holder == "" and world.other == GONE:
            yield "B gets the lock", self._b_gets_the_lock(world)
        if not (self._guard_is_due(world) or self._keeper_is_due(world) or self._news_is_due(world)):
            kill_left = world.kill_left - self._is_killing(world)
            if kill_left >= 0:  # else the tree is dead for sure
                yield "a second passes", self._tick(world, kill_left)

    # Processes of host A

    def _guard_is_due(self, world: World) -> bool:
        if world.guard == GONE or world.guard_paused:
            return False
        guard = self.guards.machines[world.guard]
        keeper_lost = world.keeper == GONE and not world.keeper_told
        heard = bool(world.to_guard) or world.held is not None
        return heard or keeper_lost or world.mark > guard.checked_at or guard.deadline <= 0

    def _keeper_is_due(self, world: World) -> bool:
        if world.keeper == GONE or world.keeper_paused:
            return False
        keeper = self.keepers.machines[world.keeper]
        if self.bounds.keeper_blocks and keeper.asked_at is not None:
            return False
        return (world.guard == GONE and keeper.guard_lives) or keeper.deadline <= 0

    def _news_is_due(self, world: World) -> bool:
        return self.bounds.prompt and bool(world.down) and world.keeper != GONE and not world.keeper_paused

    def _processes(self, world: World) -> Iterator[tuple[str, World]]:
        if self._guard_is_due(world):
            yield "guard wakes", self._guard_turn(world)
        if self._keeper_is_due(world):
            yield "keeper wakes", self._keeper_turn(world)
        if world.tree and world.command and world.guard != GONE and not world.guard_paused:
            yield "command ends, its tree lives on", self._feed_guard(world, _COMMAND_ENDED)._replace(command=False)

    def _guard_turn(self, world: World) -> World:
        """One turn of the guard's loop: a loss, the keeper's end, the lock, the last check, the deadline."""
        for why in world.to_guard:
            world = self._feed_guard(world, g.LockLost(why))
        world = world._replace(to_guard=())
        if world.keeper == GONE and not world.keeper_told:
            world = self._feed_guard(world, g.KeeperLost())._replace(keeper_told=True)
        if world.held is not None:
            world = self._feed_guard(world, g.LockAcquired(world.held))._replace(held=None)
        if world.mark > self.guards.machines[world.guard].checked_at:
            world = self._feed_guard(world, g.LockChecked(world.mark))
        if self.guards.machines[world.guard].deadline <= 0:
            world = self._feed_guard(world, g.DeadlinePassed())
        return world

    def _feed_guard(self, world: World, event: g.Event) -> World:
        guard, actions = self.step_guard(world.guard, event)
        world = world._replace(guard=guard)
        for action in actions:
            match action:
                case g.KillTree():
                    world = world._replace(kill_left=min(world.kill_left, KILL_TAKES))
                case g.SpawnChild():
                    world = world._replace(tree=True, overlap=0 if world.b_runs else -1)
                case g.SignalTree() | g.ReportUnkillable():
                    pass  # the tree may end at any time, and need not
                case _:
                    assert not world.tree, f"{action} under a living tree: {world}"
                    world = world._replace(over=True)
        return world

    def _step_guard(self, number: int, event: g.Event) -> tuple[int, tuple[g.Action, ...]]:
        after, actions = g.step(self.guards.machines[number], event, 0.0)
        return self.guards.number(_plain(after)), actions

    def _keeper_turn(self, world: World) -> World:
        """One turn of the keeper's loop: the guard's end, the deadline."""
        if world.guard == GONE and self.keepers.machines[world.keeper].guard_lives:
            world = self._feed_keeper(world, k.GuardGone())
        if self.keepers.machines[world.keeper].deadline <= 0:
            world = self._feed_keeper(world, k.DeadlinePassed())
        return world

    def _feed_keeper(self, world: World, event: k.Event) -> World:
        keeper, actions = self.step_keeper(world.keeper, event)
        world = world._replace(keeper=keeper)
        for action in actions:
            match action:
                case k.SendCheck() | k.LockAgain():
                    sent = 0.0 if self.bounds.client_timeout < inf else inf
                    world = world._replace(up=(*world.up, ("check" if action == k.SendCheck() else "lock", sent)))
                case k.PublishCheck(checked_at):
                    world = world._replace(mark=checked_at)
                case k.TellLost(why):
                    world = world._replace(to_guard=(*world.to_guard, why)) if world.guard != GONE else world
                case k.RaiseShield():
                    world = world._replace(shield=world.holder != "shield")
                case k.KillGuard():
                    world = _without_guard(world)
                case k.KillTree():
                    world = world._replace(kill_left=min(world.kill_left, KILL_TAKES))
                case k.ReportUnkillable():
                    pass
                case _:
                    raise AssertionError(f"{action} under a living tree: {world}")
        return world

    def _step_keeper(self, number: int, event: k.Event) -> tuple[int, tuple[k.Action, ...]]:
        after, actions = k.step(self.keepers.machines[number], event, 0.0)
        return self.keepers.number(after), actions

    def _is_killing(self, world: World) -> bool:
        """Tell whether somebody sends KILL again and again; what forks survives a killer that was stopped."""
        guard = world.guard != GONE and not world.guard_paused and self.guards.machines[world.guard]
        keeper = world.keeper != GONE and not world.keeper_paused and self.keepers.machines[world.keeper]
        return bool(
            (guard and guard.state is g.State.KILLING) or (keeper and keeper.state is k.State.TAKING_OVER),
        )

    def _faults(self, world: World) -> Iterator[tuple[str, World]]:
        """Kill -9, stop and continue. A process that has nothing to do need not be stopped: it is as good later."""
        if world.guard_paused:
            yield "guard continues", world._replace(guard_paused=False)
        if world.keeper_paused:
            yield "keeper continues", world._replace(keeper_paused=False)
        faulty = (world.guard == GONE or world.guard_paused) + (world.keeper == GONE or world.keeper_paused)
        may_fail = faulty < self.bounds.faults_at_once
        if world.deaths < self.bounds.deaths:
            after = world._replace(deaths=world.deaths + 1)
            if world.guard != GONE and (may_fail or world.guard_paused):
                yield "guard is killed", _without_guard(after)
            if world.keeper != GONE and (may_fail or world.keeper_paused):
                holder = "" if world.holder == "shield" else world.holder  # its socket is the keeper's alone
                yield "keeper is killed", after._replace(keeper=GONE, keeper_paused=False, shield=False, holder=holder)
        if may_fail and world.pauses < self.bounds.pauses:
            killing = self._is_killing(world)
            after = world._replace(pauses=world.pauses + 1)
            if self._guard_is_due(world) or (killing and world.guard != GONE and not world.guard_paused):
                yield "guard stops", after._replace(guard_paused=True)
            if self._keeper_is_due(world) or (killing and world.keeper != GONE and not world.keeper_paused):
                yield "keeper stops", after._replace(keeper_paused=True)

    # Network and server

    def _network(self, world: World) -> Iterator[tuple[str, World]]:
        """Deliver the next message in either direction, or never; A's kernel may lose its patience."""
        if world.up and world.session:
            yield f"server gets {world.up[0][0]}", _server_gets(world)
            if -world.up[0][1] >= self.bounds.client_timeout:
                yield "A's kernel resets the connection", _end_session(world)
        if world.down and world.keeper != GONE and not world.keeper_paused:
            event, *rest = world.down
            yield f"keeper gets {event}", self._feed_keeper(world._replace(down=tuple(rest)), event)

    def _server(self, world: World) -> Iterator[tuple[str, World]]:
        bounds = self.bounds
        if world.session:
            if -world.heard >= bounds.timing.ttl:
                yield "server gives A up", _end_session(world)
            if world.terminations < bounds.terminations:
                after = world._replace(terminations=world.terminations + 1)
                yield "A's backend is terminated", _end_session(after)
            if world.unlocks < bounds.unlocks and world.holder == "A":
                yield "A is unlocked", world._replace(holder="", unlocks=world.unlocks + 1)
            if world.restarts < bounds.restarts:
                after = world._replace(restarted=0.0, restarts=world.restarts + 1)
                yield "server restarts", _end_session(after)._replace(holder="")
        if world.holder == "shield" and world.terminations < bounds.terminations:
            after = world._replace(terminations=world.terminations + 1)
            yield "the shield is terminated", after._replace(holder="", shield=True)
        if world.shield and world.holder == "" and world.keeper != GONE and not world.keeper_paused:
            yield "the shield is up", world._replace(shield=False, holder="shield")

    # The second host, whose own processes are sound and whose checks are answered at once

    def _b_gets_the_lock(self, world: World) -> World:
        """Settle as the real thing decides; no longer than the server's age asks."""
        age = ServerAge(started_s=-world.restarted) if world.restarted > -inf else ServerAge()
        window = (self.bounds.reckoned or self.bounds.timing).window
        wait_s = decide_settle(self.bounds.settle, age, window).wait_s
        other, actions = self._settle(wait_s)
        return self._start_b(world._replace(holder="B", other=other), actions)

    def _start_b(self, world: World, actions: tuple[g.Action, ...]) -> World:
        return world._replace(b_runs=True, overlap=0 if world.tree else -1) if actions else world

    def _age_b(self, world: World) -> World:
        if world.overlap >= 0:
            return world._replace(overlap=world.overlap + 1)
        if world.other == GONE or world.b_runs:
            return world
        other, actions = self.step_guard(self.age_guard(world.other), g.LockChecked(0.0))
        return self._start_b(world._replace(other=other), actions)

    # Time

    def _tick(self, world: World, kill_left: float) -> World:
        stale = self.bounds.stale
        return self._age_b(
            world._replace(
                guard=self.age_guard(world.guard),
                keeper=self.age_keeper(world.keeper),
                held=None if world.held is None else max(world.held - 1, stale),
                mark=max(world.mark - 1, stale),
                heard=max(world.heard - 1, -self.bounds.timing.ttl),
                up=tuple((kind, sent - 1) for kind, sent in world.up),
                restarted=world.restarted - 1 if -world.restarted <= self.bounds.timing.window + 1 else -inf,
                kill_left=kill_left,
            )
        )

    def _age_guard(self, number: int) -> int:
        if number == GONE:
            return GONE
        guard, stale = self.guards.machines[number], self.bounds.stale
        moved = replace(
            guard,
            deadline=max(guard.deadline - 1, stale),
            checked_at=max(guard.checked_at - 1, stale),
            settle_until=max(guard.settle_until - 1, stale),
            kill_at=max(guard.kill_at - 1, stale),
        )
        return self.guards.number(moved)

    def _age_keeper(self, number: int) -> int:
        if number == GONE:
            return GONE
        keeper, stale = self.keepers.machines[number], self.bounds.stale
        moved = replace(
            keeper,
            deadline=max(keeper.deadline - 1, stale),
            checked_at=max(keeper.checked_at - 1, stale),
            asked_at=None if keeper.asked_at is None else max(keeper.asked_at - 1, stale),
            take_over_at=max(keeper.take_over_at - 1, stale),
        )
        return self.keepers.number(moved)


_COMMAND_ENDED = g.ChildExited(ChildEnd(exit=0))


def _without_guard(world: World) -> World:
    """The kernel kills the command with its guard, and gives the rest of the tree to the keeper."""
    return world._replace(guard=GONE, guard_paused=False, command=False, to_guard=(), over=not world.tree)


def _server_gets(world: World) -> World:
    (kind, _), *rest = world.up
    world = world._replace(up=tuple(rest), heard=0.0)
    if kind == "lock":
        return world._replace(holder=world.holder or "A")
    return world._replace(down=(*world.down, k.CheckAnswered(held=world.holder == "A", primary=True)))


def _end_session(world: World) -> World:
    """A's backend is gone; whether A ever hears of it is the network's affair."""
    holder = "" if world.holder == "A" else world.holder
    return world._replace(session=False, holder=holder, up=(), down=(*world.down, k.SessionEnded()))


def _plain(guard: g.Guard) -> g.Guard:
    """Leave out what only reports read."""
    return replace(
        guard,
        ending=Ending(child=guard.ending.child, lost_why=guard.ending.lost_why),
        locked_at=0.0,
        spawned_at=0.0 if guard.spawned_at < inf else inf,
        stopping_since=0.0 if guard.stopping_since < inf else inf,
    )
