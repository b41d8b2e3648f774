"""The guard process: the command's parent. It turns what happens into events and does what core answers.

It never imports psycopg and never talks to the database: what it knows of the lock comes from the
keeper, through the channel and the check mark, and its decision to kill comes from its own clock.
"""

import os
import select
import signal
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from batchguard.adapters import child, process_tree, report, signals
from batchguard.adapters.channel import Channel, CheckMark, Message, shut_down
from batchguard.adapters.clock import now
from batchguard.adapters.signals import CallerSignals, SignalPipe
from batchguard.core import guard as core
from batchguard.core import messages
from batchguard.core.outcome import Ending, LostWhy
from batchguard.core.settings import RunRequest
from batchguard.runtime.ending import RunFacts, report_ending

LONGEST_SLEEP = 1.0
"""poll(2) sleeps on a clock that stops with the machine: wake often, so that a resumed machine looks at once."""
KILL_PAUSE = 0.002
TERMINAL_STOP = (signal.SIGTSTP,)
"""A command that has the terminal to itself ignores Ctrl-Z: its shell waits for the keeper, which must not be stopped,
so the terminal would be stuck."""
RUN_VARIABLES = (
    "KEY",
    "NAME",
    "RUN_ID",
    "SLOT",
    "TOKEN",
    "LOCK_PID",
    "LOCK_SINCE",
    "DATABASE",
    "SYSTEM_ID",
    "LOCK_DSN",
)


def run_guard(request: RunRequest, channel: Channel, mark: CheckMark, caller: CallerSignals) -> None:
    """Guard one run until it is over; to be called in the forked process, which then leaves."""
    process_tree.become_subreaper()
    _GuardLoop(request, channel, mark, caller).run()


class _GuardLoop:
    def __init__(self, request: RunRequest, channel: Channel, mark: CheckMark, caller: CallerSignals) -> None:
        settings = request.settings
        self.request = request
        self.channel = channel
        self.mark = mark
        self.caller = caller
        self.signals = SignalPipe(caller, (*signals.FORWARDED, signal.SIGCHLD))
        plan = core.Plan(
            timing=settings.timing,
            signal=settings.signal,
            linger=_linger(request),
            max_runtime=settings.max_runtime,
            min_hold=settings.min_hold,
        )
        self.guard = core.Guard(plan=plan)
        self.child: child.Child | None = None
        self.group: int | None = None
        self.processes = 0
        self.has_foreground = False
        self.terminal: child.TerminalSettings | None = None
        self.lock_fd: int | None = None
        self.environment: dict[str, str] = {}
        self.facts: RunFacts | None = None
        self.seen_mark = 0.0
        self.woke_at = now()

    def run(self) -> None:
        while self.guard.state is not core.State.ENDED:
            slept_s = self.wait()
            for event in self.what_happened():
                self.feed(event)
            if now() >= self.guard.deadline:
                self.feed(core.DeadlinePassed(slept_s))
            if self.guard.state is core.State.KILLING:
                process_tree.kill_tree(os.getpid())
        if self.has_foreground:
            child.take_foreground()
            if self.guard.ending.stop_took_s is not None:
                child.restore_terminal(self.terminal)  # a program that is killed leaves it as it was for its own use
        if self.facts is not None and not self.guard.keeper_lives:
            report_ending(self.facts, self.ending(), self.request.settings)

    def wait(self) -> float:
        """Sleep until something happens; give the seconds since we were last awake."""
        longest = self.pause()
        poll = select.poll()
        poll.register(self.signals, select.POLLIN)
        if self.channel.is_open:
            poll.register(self.channel, select.POLLIN)
        # Rounded up: a sleep that ends before the deadline would come back at once, again and again.
        poll.poll(max(0.0, min(self.guard.deadline - now(), longest)) * 1000 + 1)
        slept_s = now() - self.woke_at
        self.woke_at += slept_s
        return slept_s

    def pause(self) -> float:
        """Give the longest sleep: short while killing, until it has turned out that KILL does not help."""
        killing = self.guard.state is core.State.KILLING and not self.guard.reported_unkillable
        return KILL_PAUSE if killing else LONGEST_SLEEP

    def what_happened(self) -> Iterator[core.Event]:
        """Give what has happened since the last call.

        Ends come before signals: one sent after the command's end must not be forwarded to nobody.
        Signals, a loss and the keeper's end come before the lock: the command then never starts.
        """
        yield from self.ended()
        numbers = self.signals.read()
        for number in numbers:
            if number != signal.SIGCHLD:
                yield core.SignalReceived(number)
        if signal.SIGCHLD in numbers:
            yield from self.ended()  # it may have come after the first look, and will not come again
        news = self.channel.receive()
        for message in news:
            if message.kind != "held":
                yield from self.heard(message)
        if not self.channel.is_open and self.guard.keeper_lives:
            yield core.KeeperLost()
        for message in news:
            if message.kind == "held" and self.guard.state is not core.State.ENDED:
                yield from self.heard(message)
        if (checked_at := self.mark.read()) > self.seen_mark:
            self.seen_mark = checked_at
            yield core.LockChecked(checked_at)

    def heard(self, message: Message) -> Iterator[core.Event]:
        values = message.values
        match message.kind:
            case "held" if message.fds:
                self.lock_fd = message.fds[0]
                self.environment = dict(values["environment"])
                self.facts = RunFacts.from_json(values["facts"])
                yield core.LockAcquired(values["checked_at"], values["settle_s"])
            case "held":
                # Out of descriptors: without the duplicate the lock would not outlive the keeper.
                yield core.LockAcquired(values["checked_at"], inf)
                yield core.SpawnFailed(126, "no descriptor is free for the lock's socket; raise ulimit -n")
            case "lost":
                yield core.LockLost(LostWhy(values["why"]))
            case "signal":
                yield core.SignalReceived(values["number"], relayed=True)
            case "unlocked":
                yield core.Unlocked(values["was_held"])

    def ended(self) -> Iterator[core.Event]:
        """Give who has ended, and how many are left where that matters."""
        yield from self.reaped()
        if self.guard.state in (core.State.LINGERING, core.State.STOPPING, core.State.KILLING):
            living = process_tree.living_descendants(os.getpid())
            in_tree = max(len(living), int(process_tree.has_children()))
            in_group = process_tree.count_group(self.group, living) if self.group is not None else 0
            yield core.TreeCounted(in_group=in_group, in_tree=in_tree)

    def reaped(self) -> Iterator[core.Event]:
        for pid, end in process_tree.reap().items():
            if self.child is not None and pid == self.child.pid:
                failed = self.child.exec_error()
                self.child = None
                if failed is None:
                    yield core.ChildExited(end)
                else:
                    code, why = failed
                    yield core.SpawnFailed(code, child.explain(self.request.argv[0], code, why))

    def feed(self, event: core.Event) -> None:
        self.guard, actions = core.step(self.guard, event, now())
        for action in actions:
            self.act(action)

    def act(self, action: core.Action) -> None:
        match action:
            case core.SpawnChild():
                self.channel.send("spawned")
                self.spawn()
            case core.ForwardSignal(number):
                self.forward(number)
            case core.SignalTree(number):
                self.processes = process_tree.signal_tree(os.getpid(), number)
            case core.KillTree():
                self.processes = max(self.processes, len(process_tree.living_descendants(os.getpid())))
                if self.child is not None and self.group is not None:
                    process_tree.send_group(self.group, signal.SIGKILL)  # needs no descriptor, as the walk does
                process_tree.kill_tree(os.getpid())
            case core.ReportUnkillable():
                self.report_unkillable()
            case core.AskRelease():
                self.channel.send("release", {"ending": self.ending().to_json()})
            case core.EndSession():
                self.end_session()
            case core.Exit():
                pass

    def ending(self) -> Ending:
        return replace(self.guard.ending, processes=self.processes)

    def spawn(self) -> None:
        self.has_foreground = child.owns_foreground() and process_tree.is_alone_in_group()
        self.terminal = child.terminal_settings() if self.has_foreground else None
        own_pid = os.getpid()

        def prepare() -> None:
            process_tree.die_with_parent(own_pid)
            if self.has_foreground:
                child.take_foreground()
            signals.give_back(self.caller, and_ignore=TERMINAL_STOP if self.has_foreground else ())

        try:
            with signals.AllBlocked():
                self.child = child.start(
                    self.request.argv,
                    self.command_environment(),
                    lock_fd=self.lock_fd if self.request.settings.inherit_lock else None,
                    prepare=prepare,
                )
            self.group = self.child.pid
        except OSError as error:
            self.feed(core.SpawnFailed(126, f"{self.request.argv[0]}: {error.strerror}"))

    def command_environment(self) -> dict[str, str]:
        """Our own environment, without what an outer run said of itself, and with what this run says."""
        of_an_outer_run = {f"BATCHGUARD_{name}" for name in RUN_VARIABLES}
        kept = {name: value for name, value in child.caller_environment().items() if name not in of_an_outer_run}
        return kept | self.environment

    def forward(self, number: int) -> None:
        """Signal the command's group; where setsid(1) or the user made the tree the batch, all of it.

        CONT follows, as from timeout(1): a stopped batch would sleep on, and the lock with it.
        """
        if self.guard.plan.linger is core.Linger.ALL:
            process_tree.signal_tree(os.getpid(), number)
        elif self.group is not None and (self.child is not None or self.group_lives()):
            process_tree.send_group(self.group, number)
            process_tree.send_group(self.group, signal.SIGCONT)

    def group_lives(self) -> bool:
        """Tell whether the group is still ours: reaped and empty, its number may be given anew."""
        return any(process.group == self.group for process in process_tree.living_descendants(os.getpid()))

    def report_unkillable(self) -> None:
        pids = [process.pid for process in process_tree.living_descendants(os.getpid())]
        if self.facts is not None:
            report.say(messages.unkillable(self.facts.subject, pids), self.request.settings.log_format)

    def end_session(self) -> None:
        """Free the lock without the keeper, who is told in case it only slept."""
        if self.channel.is_open:
            self.channel.send("ended_session")
        if self.lock_fd is not None:
            shut_down(self.lock_fd)
            self.lock_fd = None


def _linger(request: RunRequest) -> core.Linger:
    """Treat `setsid job` as the job: setsid(1) forks and returns at once, and the job is in no group of ours."""
    if os.path.basename(request.argv[0]) == "setsid" and request.settings.wait_descendants is core.Linger.GROUP:
        return core.Linger.ALL
    return request.settings.wait_descendants
