"""The keeper process: the outer one. It owns the connection, and stands in for a guard that is gone.

It never blocks: one loop over the session's socket, the channel and the signals.
"""

import contextlib
import os
import select
import signal
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NoReturn

from psycopg import OperationalError
from psycopg.conninfo import make_conninfo

from batchguard.adapters import lock_session, process_tree, report, signals
from batchguard.adapters.channel import Channel, CheckMark, duplicate, shut_down
from batchguard.adapters.clock import now
from batchguard.adapters.postgres import (
    READ,
    ConnectFailedError,
    Conversation,
    Row,
    Session,
    SessionEndedError,
    StatementError,
    TimedOutError,
    Wait,
    connect,
    drive,
    execute,
    session_parameters,
    watch,
)
from batchguard.adapters.signals import CallerSignals, SignalPipe
from batchguard.core import keeper as core
from batchguard.core import messages, refusals
from batchguard.core.errors import BatchguardError, SystemLimitError
from batchguard.core.exit_codes import ExitCode, exit_code_of_signal
from batchguard.core.guard import SUSPENDED_AFTER
from batchguard.core.messages import Subject
from batchguard.core.outcome import Ending, RunOutcome
from batchguard.core.settings import RunRequest
from batchguard.runtime.access import QUERIES, check_params, pause
from batchguard.runtime.acquire import RELEASED, Held, Skipped, acquire
from batchguard.runtime.ending import RunFacts, report_ending, write_files
from batchguard.runtime.guard import KILL_PAUSE, LONGEST_SLEEP, RUN_VARIABLES

SHIELD_PAUSE = 0.05
"""Seconds between two tries to take a lost key again."""
SLOW_SHIELD_PAUSE = 1.0
LOOKS = 25
"""Beside children that are not ours to kill, the tree counts as gone when it was not there so many times in a row."""


def run_keeper(request: RunRequest, channel: Channel, mark: CheckMark, caller: CallerSignals, guard_pid: int) -> int:
    """Keep the lock of one run until it is over, and give the exit code.

    Raises:
        BatchguardError: the command was not started, and why.
    """
    try:
        pipe = SignalPipe(caller, (*signals.FORWARDED, signal.SIGCHLD))
    except OSError as error:
        raise SystemLimitError(refusals.system_limit(request.key_text, error.errno, error.strerror)) from None
    return _Keeper(request, channel, mark, pipe, guard_pid).run()


class _InterruptedError(Exception):
    """A signal came while nothing was held."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _GuardDiedError(Exception):
    """The guard died while nothing was held."""


@dataclass
class _Talk:
    """A conversation under way and what it waits for; `purpose` says what its end means."""

    purpose: str
    conversation: Conversation[Any]
    wait: Wait


class _Keeper:
    def __init__(
        self, request: RunRequest, channel: Channel, mark: CheckMark, pipe: SignalPipe, guard_pid: int
    ) -> None:
        self.request = request
        self.settings = request.settings
        self.channel = channel
        self.mark = mark
        self.signals = pipe
        self.guard_pid = guard_pid
        self.strangers = frozenset(process_tree.children(os.getpid())) - {guard_pid}
        self.seen_nobody = 0
        self.spawned = False
        self.woke_at = now()
        self.long_sleep = (0.0, 0.0)  # how long, and when it ended
        self.ending: Ending | None = None
        self.guard_ended_session = False
        self.processes = 0
        self.sqlstate: str | None = None
        host = os.uname().nodename
        run_id, since = str(uuid.uuid4()), report.timestamp()
        self.about = {"run_id": run_id, "host": host, "pid": os.getpid()}
        subject = Subject(request.key_text, "", "")
        keys = tuple(str(key) for key in request.keys)
        self.facts = RunFacts(run_id, subject, keys, since, request.name, host=host)

    def run(self) -> int:
        """Get the lock and hold it as long as the batch lives."""
        outer = {name: value for name in RUN_VARIABLES if (value := os.environ.get(f"BATCHGUARD_{name}"))}
        told = self.request.verbose or report.is_terminal() or self.settings.warn_held < inf
        want_holder = told or self.settings.log_file is not None or self.settings.status_skips
        try:
            acquisition = acquire(self.request, self.about, want_holder, outer)
            got = self.get(acquisition)
        except _InterruptedError as interrupted:
            return self.not_started(RunOutcome.INTERRUPTED, exit_code_of_signal(interrupted.number), None)
        except _GuardDiedError:
            return self.guard_died_early()
        except BatchguardError as error:
            self.not_started(RunOutcome.NOT_STARTED, error.exit_code, str(error))
            error.log_format = self.settings.log_format
            raise
        if isinstance(got, Skipped):
            return self.skip(got, outer.get("RUN_ID", ""))
        return self.hold(got)

    # Before the lock is held

    def get(self, acquisition: Conversation[Held | Skipped]) -> Held | Skipped:
        try:
            return drive(acquisition, self.sleep_unless_interrupted)
        except OSError as error:
            raise SystemLimitError(refusals.system_limit(self.facts.subject.key, error.errno, error.strerror)) from None

    def sleep_unless_interrupted(self, wait: Wait) -> int:
        """Sleep for a conversation; a signal, or the guard's death, ends it at once."""
        ready = self.sleep([wait], now() + LONGEST_SLEEP)[0]
        self.look_around()
        return ready

    def look_around(self) -> None:
        numbers = self.signals.read()
        for number in numbers:
            if number != signal.SIGCHLD:
                raise _InterruptedError(number)
        for message in self.channel.receive():
            if message.kind == "release":
                raise _InterruptedError(message.values["ending"]["interrupted_by"])
        if self.guard_pid in self.reap():
            raise _GuardDiedError

    def not_started(self, outcome: RunOutcome, code: int, message: str | None) -> int:
        self.dismiss_guard()
        write_files(self.facts, self.settings, outcome, code, message=message)
        return int(code)

    def guard_died_early(self) -> int:
        message = messages.guard_died_early(self.facts.subject)
        report.say(message, self.settings.log_format)
        write_files(self.facts, self.settings, RunOutcome.NOT_STARTED, ExitCode.LOST, message=message)
        return ExitCode.LOST

    def dismiss_guard(self) -> None:
        """End a guard that has started nothing, and leave no process behind."""
        process_tree.send(self.guard_pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.guard_pid, 0)

    def skip(self, skipped: Skipped, outer_run_id: str) -> int:
        """Leave without a start: silent under cron, but where --warn-held or a loop in itself says otherwise."""
        code = self.settings.skip_code
        self.dismiss_guard()
        self.note_identity(skipped.subject, skipped.identity, skipped.waited_s)
        holder = skipped.holder
        message = messages.skipped(skipped.subject, holder, code)
        loud = self.request.verbose or report.is_terminal()
        if skipped.inside_itself:
            message = messages.skipped_inside_itself(skipped.subject, outer_run_id)
            loud = True
        elif holder is not None and self.settings.warn_held < inf:
            unknown_or_long = holder.held_s is None or holder.held_s > self.settings.warn_held
            loud = loud or holder.by == "other" or unknown_or_long
        if loud:
            report.say(
                message, self.settings.log_format, run_id=self.facts.run_id, key=self.facts.subject.key, exit_code=code
            )
        write_files(self.facts, self.settings, RunOutcome.SKIPPED, code, holder=holder, message=message)
        return code

    def note_identity(self, subject: Subject, identity: lock_session.Identity, waited_s: float) -> None:
        self.facts = replace(
            self.facts,
            subject=subject,
            keys=(subject.key.split()[0],) if not self.facts.keys else self.facts.keys,
            database=identity.database,
            server=subject.host,
            waited_s=waited_s,
        )

    # While the lock is held

    def hold(self, held: Held) -> int:
        """Hand the lock to the guard, and hold it until the batch is over."""
        self.held = held
        self.shield: _Talk | None = None
        self.shield_session: Session | None = None
        self.keeper = core.start_keeper(self.settings.timing, held.checked_at)
        self.locked_at = now()
        self.note_identity(held.subject, held.identity, held.waited_s)
        self.facts = replace(
            self.facts, slot=held.slot, token=held.token, settled_s=held.settle.wait_s, keys=tuple(map(str, held.locks))
        )
        self.socket_copy = duplicate(held.session.fd)
        try:
            self.look_around()
            self.hand_over(held)
        except _InterruptedError as interrupted:
            return self.not_started(RunOutcome.INTERRUPTED, exit_code_of_signal(interrupted.number), None)
        except _GuardDiedError:
            return self.guard_died_early()
        try:
            self.announce(held)
            self.talk: _Talk | None = self.begin("watch", watch(held.session))
            self.woke_at = now()
            while self.keeper.state is not core.State.ENDED:
                self.turn()
        except BaseException as error:
            self.leave_to_guard(error)
        shut_down(self.socket_copy)
        return self.finish()

    def leave_to_guard(self, error: BaseException) -> NoReturn:
        """Leave after a fault of our own with the session open: the guard ends the batch, and then the session.

        Python's ordinary way out would run libpq's goodbye to the server, which frees the lock at once.
        """
        report.say(
            f"internal error in the keeper: {type(error).__name__}: {error}. Please report it.",
            self.settings.log_format,
        )
        os._exit(ExitCode.SOFTWARE)

    def hand_over(self, held: Held) -> None:
        """Give the guard a duplicate of the socket: the server sees the session end only when both are gone."""
        self.mark.write(held.checked_at)
        values = {
            "checked_at": held.checked_at,
            "settle_s": held.settle.wait_s,
            "environment": self.run_environment(held),
            "facts": self.facts.to_json(),
        }
        if not self.channel.send("held", values, [held.session.fd]):
            raise _GuardDiedError

    def run_environment(self, held: Held) -> dict[str, str]:
        identity = held.identity
        variables = {
            "KEY": " ".join(map(str, held.locks)),
            "NAME": self.request.name,
            "RUN_ID": self.facts.run_id,
            "SLOT": None if held.slot is None else str(held.slot),
            "TOKEN": held.token,
            "LOCK_PID": str(identity.backend_pid),
            "LOCK_SINCE": identity.session_start,
            "DATABASE": identity.database,
            "SYSTEM_ID": identity.system_id,
            "LOCK_DSN": _dsn_without_secrets(held.session.params),
        }
        return {f"BATCHGUARD_{name}": value for name, value in variables.items() if value is not None}

    def announce(self, held: Held) -> None:
        loud = self.request.verbose or report.is_terminal()
        if held.settle.wait_s and loud:
            report.say(
                messages.settling(held.subject, held.settle.wait_s, held.settle.reason), self.settings.log_format
            )
        if self.settings.allow_pooler and loud:
            report.say(messages.pooler_allowed(), self.settings.log_format)

    def turn(self) -> None:
        """Sleep until something happens, tell core, do what it says."""
        killing = self.keeper.state is core.State.TAKING_OVER and not self.keeper.reported_unkillable
        pause_s = KILL_PAUSE if killing or self.seen_nobody else LONGEST_SLEEP
        until = min(self.keeper.deadline, now() + pause_s)
        talks = [talk for talk in (self.talk, self.shield) if talk is not None]
        ready = self.sleep([talk.wait for talk in talks], until)
        slept_s = self.note_sleep()
        for event in self.what_happened(list(zip(talks, ready, strict=True))):
            self.feed(event)
        if now() >= self.keeper.deadline:
            self.feed(core.DeadlinePassed(slept_s))
        if self.keeper.state is core.State.TAKING_OVER:
            self.kill_tree()

    def kill_tree(self) -> None:
        """Kill what is below us, but not what our caller had started before it became us (`job & exec …`)."""
        process_tree.kill_tree(os.getpid(), self.strangers)
        self.reap()
        if not self.strangers:
            gone = not process_tree.has_children()
        else:
            self.seen_nobody = self.seen_nobody + 1 if process_tree.has_only(self.strangers) else 0
            gone = self.seen_nobody >= LOOKS
        if gone:
            self.feed(core.TreeGone())

    def reap(self) -> set[int]:
        """Collect who has ended; the number of a stranger that ended may be given to one of the batch."""
        ended = set(process_tree.reap())
        self.strangers -= ended
        return ended

    def note_sleep(self) -> float:
        """Give the seconds since we were last awake: far more than a second means that we were stopped."""
        woke_at = now()
        slept_s = woke_at - self.woke_at
        self.woke_at = woke_at
        if slept_s > SUSPENDED_AFTER:
            self.long_sleep = (slept_s, woke_at)
        return slept_s

    def sleep(self, waits: list[Wait], until: float) -> list[int]:
        """Sleep until a signal, a message, one of the waits, or `until`; give the events of each wait."""
        poll = select.poll()
        poll.register(self.signals, select.POLLIN)
        if self.channel.is_open:
            poll.register(self.channel, select.POLLIN)
        for wait in waits:
            if wait.fd >= 0:
                poll.register(wait.fd, wait.events)
            until = min(until, wait.until)
        # Rounded up: a sleep that ends before the deadline would come back at once, again and again.
        ready = dict(poll.poll(max(0.0, until - now()) * 1000 + 1))
        return [ready.get(wait.fd, 0) for wait in waits]

    def what_happened(self, talks: list[tuple[_Talk, int]]) -> Iterator[core.Event]:
        """Give what has happened, the session's news first and the guard's end last."""
        for talk, ready in talks:
            if ready or now() >= talk.wait.until:
                yield from self.carry_on(talk, ready)
        for number in self.signals.read():
            if number != signal.SIGCHLD:
                self.channel.send("signal", {"number": number})
        for message in self.channel.receive():
            if message.kind == "release":
                self.ending = Ending.from_json(message.values["ending"])
                yield core.ReleaseAsked()
            elif message.kind == "spawned":
                self.spawned = True
            elif message.kind == "ended_session":
                self.guard_ended_session = True
        if self.guard_pid in self.reap():
            yield core.GuardGone()

    def feed(self, event: core.Event) -> None:
        self.keeper, actions = core.step(self.keeper, event, now())
        for action in actions:
            self.act(action)

    def act(self, action: core.Action) -> None:
        match action:
            case core.SendCheck():
                self.talk = self.begin("check", self.check())
            case core.PublishCheck(checked_at):
                self.mark.write(checked_at)
            case core.TellLost(why):
                self.channel.send("lost", {"why": why.value})
            case core.RaiseShield():
                self.shield = self.shield or self.begin("shield", self.hold_shield())
            case core.LockAgain():
                self.talk = self.begin("lock_again", self.lock_again(self.held.session))
            case core.KillGuard():
                process_tree.kill_tree(os.getpid(), self.strangers)  # the guard is the first of them
            case core.KillTree():
                self.processes = len(process_tree.living_descendants(os.getpid(), self.strangers))
            case core.ReportUnkillable():
                living = process_tree.living_descendants(os.getpid(), self.strangers)
                pids = [process.pid for process in living]
                report.say(messages.unkillable(self.facts.subject, pids), self.settings.log_format)
            case core.SendUnlock():
                self.talk = self.begin("unlock", self.unlock())
            case core.CloseSession():
                self.close()
            case core.TellUnlocked(was_held):
                self.channel.send("unlocked", {"was_held": was_held})
            case core.Exit():
                pass

    # Conversations

    def begin(self, purpose: str, conversation: Conversation[Any]) -> _Talk | None:
        """Start a conversation; None when it ended, or its session did, before it had to wait."""
        talk = _Talk(purpose, conversation, Wait(-1, 0))
        try:
            talk.wait = next(conversation)
        except SessionEndedError as ended:
            talk.conversation = _ended(ended)  # an event like any other, at the next turn
            talk.wait = next(talk.conversation)
        except StopIteration:
            return None
        return talk

    def carry_on(self, talk: _Talk, ready: int) -> Iterator[core.Event]:
        """Let a conversation go on; its end is an event."""
        if talk not in (self.talk, self.shield):
            return  # another event of this turn has ended it
        try:
            talk.wait = talk.conversation.send(ready)
        except StopIteration as end:
            yield from self.answered(talk.purpose, end.value)
        except SessionEndedError as ended:
            if talk is self.talk:
                self.sqlstate = ended.sqlstate
                self.talk = None
                yield core.SessionEnded()
        except StatementError:
            yield from self.refused(talk.purpose)

    def answered(self, purpose: str, value: Any) -> Iterator[core.Event]:
        if purpose == "shield":
            self.shield = None
            return
        self.talk = self.begin("watch", watch(self.held.session))
        if purpose == "check":
            held, primary = value[0]
            yield core.CheckAnswered(held=held == "t", primary=primary == "t")
        elif purpose == "unlock":
            yield core.UnlockAnswered(was_held=value)

    def refused(self, purpose: str) -> Iterator[core.Event]:
        """A statement failed though the session lives: somebody cancelled it, or the server is short of memory.

        A check is simply asked again; its patience runs from the first time. A refused unlock does
        not matter, since the session ends next.
        """
        self.talk = self.begin("watch", watch(self.held.session))
        if purpose == "check":
            self.talk = self.begin("check", self.check(after_s=0.2))
        elif purpose == "lock_again":
            self.talk = self.begin("lock_again", self.lock_again(self.held.session, after_s=0.2))
        elif purpose == "unlock":
            yield core.UnlockAnswered(was_held=True)

    def check(self, after_s: float = 0.0) -> Conversation[list[Row]]:
        if after_s:
            yield from pause(after_s)
        params = check_params(self.held.identity, self.held.locks, self.settings.shared)
        return (yield from execute(self.held.session, self.held.check_sql, params))

    def unlock(self) -> Conversation[bool]:
        """Give every lock back; True when all of them were held."""
        was_held = True
        yield from execute(self.held.session, QUERIES["announce"], [RELEASED])
        for lock in reversed(self.held.locks):
            query = lock_session.lock_call(QUERIES["unlock"], lock, self.settings.shared)
            rows = yield from execute(self.held.session, query, lock.numbers)
            was_held = was_held and rows[0][0] == "t"
        return was_held

    def lock_again(self, session: Session, patience: float = inf, after_s: float = 0.0) -> Conversation[None]:
        """Take every lock as soon as it is free: the server may still be about to release ours.

        The settings first: whatever took the lock away (DISCARD ALL) may have taken them too.
        """
        yield from pause(after_s)
        settings = lock_session.keepalive_settings(self.settings.ttl)
        yield from execute(session, QUERIES["prepare_session"], settings, now() + patience)
        for lock in self.held.locks:
            query = lock_session.lock_call(QUERIES["try_lock"], lock, self.settings.shared, first_parameter=5)
            params = [self.held.identity.database_oid, *lock.in_pg_locks, *lock.numbers]
            while True:
                mine, _, got = (yield from execute(session, query, params, now() + patience))[0]
                if "t" in (mine, got):
                    break
                yield from pause(self.shield_pause())

    def shield_pause(self) -> float:
        """Try often at first; where a tree does not die, the server must not suffer for it."""
        return SLOW_SHIELD_PAUSE if self.keeper.reported_unkillable else SHIELD_PAUSE

    def hold_shield(self) -> Conversation[NoReturn]:
        """Take the key again on a new session, and hold it until we are closed.

        The address is the one we had, so that no name has to be looked up now; the server may be
        restarting, so it is tried until it answers.
        """
        name = lock_session.application_name("shield", self.request.key_text, "")
        params = session_parameters(self.held.session.params, name, self.settings.ttl)
        while True:
            try:
                self.shield_session = yield from connect(params, self.settings.check_timeout)
                yield from self.keep_shield(self.shield_session)
            except (ConnectFailedError, SessionEndedError, StatementError, TimedOutError, OSError, OperationalError):
                if self.shield_session is not None:
                    self.shield_session.close()
                    self.shield_session = None
                yield from pause(self.shield_pause())

    def keep_shield(self, session: Session) -> Conversation[NoReturn]:
        """Hold the key on the shield's session, checking it as any lock: the network may be cut there too."""
        patience = self.settings.check_timeout
        params = check_params(self.held.identity, self.held.locks, self.settings.shared)
        while True:
            yield from self.lock_again(session, patience)
            rows: list[Row] = [("t", "t")]
            while rows[0] == ("t", "t"):
                yield Wait(session.fd, READ, now() + self.settings.check_interval)
                rows = yield from execute(session, QUERIES["check_locks"], params, now() + patience)

    def close(self) -> None:
        """End the session and the shield; what was sent before still arrives."""
        self.talk = None
        if self.shield is not None:
            self.shield.conversation.close()
            self.shield = None
        for session in (self.shield_session, self.held.session):
            if session is not None:
                session.close()

    # The end

    def finish(self) -> int:
        """Report what happened, now that nothing can be delayed by it."""
        if not self.spawned and (self.keeper.took_over or self.ending is None):
            return self.guard_died_early()
        at = now()
        slept_s, woke_at = self.long_sleep
        verdict = core.judge(
            self.keeper,
            self.ending,
            at,
            held_s=at - self.locked_at,
            processes=self.processes,
            stopped_s=slept_s if at - woke_at < self.settings.timing.window else 0.0,
            guard_ended_session=self.guard_ended_session,
        )
        return report_ending(
            self.facts, verdict.ending, self.settings, self.sqlstate, unlock_unanswered=verdict.unlock_unanswered
        )


def _ended(error: SessionEndedError) -> Conversation[NoReturn]:
    """Say at the next turn that the session is over."""
    yield Wait(-1, 0, now())
    raise error


def _dsn_without_secrets(params: Mapping[str, str]) -> str:
    """Give the DSN of the lock's server for `still-held`, without what must not stand in an environment."""
    kept = ("host", "hostaddr", "port", "dbname", "user", "sslmode", "sslrootcert", "sslcert", "sslkey", "gssencmode")
    return make_conninfo("", **{name: params[name] for name in kept if name in params})
