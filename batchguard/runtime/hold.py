"""`batchguard hold`: keep a batch from starting, until told or until a time.

There is no command to kill here, so that one process does: a conversation with the server, carried on by a loop that
also hears signals and knows when the time is over. A hold that is lost is taken again.
"""

import contextlib
import os
import pwd
import random
import select
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from math import inf
from typing import NoReturn

from psycopg import OperationalError

from batchguard.adapters import child, lock_session, report, signals
from batchguard.adapters.clock import now, wall_time
from batchguard.adapters.postgres import (
    Conversation,
    Session,
    SessionEndedError,
    StatementError,
    TimedOutError,
    Wait,
    drive,
    execute,
    finish_statement,
    watch,
)
from batchguard.adapters.signals import CallerSignals, SignalPipe
from batchguard.core import messages, refusals
from batchguard.core.errors import BatchguardError, ConfigError
from batchguard.core.exit_codes import ExitCode, exit_code_of_signal
from batchguard.core.hold import Busy, HoldRequest, Incarnation, Loss, is_released
from batchguard.core.keys import LockKey
from batchguard.runtime.access import QUERIES, Access, pause
from batchguard.runtime.connection import sleep

LONGEST_SLEEP = 1.0
"""Seconds: poll sleeps on a clock that stops with the machine; the end of a hold is a matter of the other one."""
LONGEST_GOODBYE = 5.0
"""Seconds for giving the keys back: somebody waits at the terminal; the end of the session gives them back too."""
LAST_WORD = 0.5
"""Seconds to wait for what a silent session has left to say."""
RETAKE_PAUSE = 1.0
"""Seconds, about, between two tries to reach a server that does not answer."""


def hold(request: HoldRequest) -> int:
    """Hold the keys until the end, and give the exit code.

    Raises:
        BatchguardError: the keys were not taken, and why.
    """
    child.reserve_standard_descriptors()
    if request.detach:
        return _start_detached(request)
    caller = signals.take_over()
    return _Hold(request, caller, lambda: None).run()


def whoami() -> str:
    """Give the person at this login, though root by sudo; else the account."""
    with contextlib.suppress(OSError):
        return os.getlogin()
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class _InterruptedError(Exception):
    """A signal came."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _ReleasedError(Exception):
    """Somebody has ended the hold."""


class _OverError(Exception):
    """The time of the hold is over."""


class _Hold(Access):
    """One hold, from the first try to the end; `on_held` is called when the keys are ours for the first time."""

    def __init__(self, request: HoldRequest, caller: CallerSignals, on_held: Callable[[], None]) -> None:
        self.request = request
        self.on_held = on_held
        self.host = os.uname().nodename
        super().__init__(
            refusals.HOLD,
            replace(request.settings, shared=False),
            request.dsn,
            request.keys,
            request.key_text,
            lock_session.application_name("hold", request.key_text, f" {whoami()}@{self.host}"),
            key_from_name=request.key_from_name,
            waits=True,
            verbose=request.verbose,
        )
        self.signals = SignalPipe(caller, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
        self.end_at = request.end_at
        self.end = inf
        self.since = wall_time()
        self.taken_at: datetime | None = None
        self.loss: Loss | None = None
        self.taken: list[LockKey] = []
        self.comment = self.facts()

    def run(self) -> int:
        """Take the keys, keep them, give them back."""
        try:
            busy = drive(self.take(), self.sleep)
            if busy is not None:
                report.say(messages.cannot_hold(self.subject, busy.holder, busy.waited_s))
                return ExitCode.SKIPPED
            self.report_begin()
            self.on_held()
            released = drive(self.keep_for_good(), self.sleep)
            report.say(messages.hold_released(self.subject, released))
            return ExitCode.LOST
        except SessionEndedError as error:
            self.refuse_server(f"the server ended the session, {error.reason}")
        except _OverError:
            return self.give_back()
        except _InterruptedError as interrupted:
            if self.taken_at is None:
                return exit_code_of_signal(interrupted.number)
            return self.give_back()

    def report_begin(self) -> None:
        begun = messages.now_on_hold(
            self.subject, self.request.reason, self.end_at, os.getpid(), detached=self.request.detach
        )
        report.say(begun)

    def sleep(self, wait: Wait) -> int:
        """Sleep for a conversation; a signal, or the end of the hold, ends it at once."""
        poll = select.poll()
        poll.register(self.signals, select.POLLIN)
        if wait.fd >= 0:
            poll.register(wait.fd, wait.events)
        until = min(wait.until, self.end, now() + LONGEST_SLEEP)
        if self.end_at is not None and self.end == inf:
            until = min(until, now() + max(0.0, (self.end_at - wall_time()).total_seconds()))
        ready = dict(poll.poll(max(0.0, until - now()) * 1000 + 1))
        for number in self.signals.read():
            raise _InterruptedError(number)
        if self.is_over():
            raise _OverError
        return ready.get(wait.fd, 0)

    def is_over(self) -> bool:
        """Tell whether the end has come: by the clock that people read where they named a time of day."""
        if self.end < inf:
            return now() >= self.end
        return self.end_at is not None and wall_time() >= self.end_at

    def facts(self) -> str:
        """Write what this session tells of itself, for `status` and for the runs that are skipped."""
        return lock_session.comment(
            {
                "reason": self.request.reason,
                "until": self.end_at.isoformat(timespec="seconds") if self.end_at else None,
                "since": self.since.isoformat(timespec="milliseconds"),
                "host": self.host,
                "pid": os.getpid(),
                "check_s": self.settings.check_interval,
                "ttl_s": self.settings.ttl,
            }
        )

    # Taking the keys for the first time

    def take(self) -> Conversation[Busy | None]:
        """Take every key, waiting for each as long as was asked; give them all back when one is not to be had."""
        began = now()
        wait_until = began + self.request.wait_s
        retry_until = began + self.settings.connect_retry
        while True:
            try:
                yield from self.explained(self.open(retry_until))
                if (yield from self.explained(self.take_all(wait_until))):
                    holder = (yield from self.explained(self.holders()))[:1]
                    self.session.close()
                    return Busy(holder[0] if holder else None, now() - began)
                break
            except SessionEndedError as error:
                if now() >= wait_until:
                    raise
                report.say(messages.wait_interrupted(self.subject, error.sqlstate))
                retry_until = wait_until  # a server that restarts while we wait ends the session, not the wait
                yield from pause(RETAKE_PAUSE)
        self.taken_at = self.since = wall_time()
        if self.request.for_s is not None:
            self.end = now() + self.request.for_s
            self.end_at = self.taken_at + timedelta(seconds=self.request.for_s)
        self.comment = self.facts()
        incarnation = yield from self.explained(self.check())
        if incarnation is None:
            raise ConfigError(refusals.pooler(self.purpose, self.subject))
        self.incarnation = incarnation
        self.purpose = refusals.RETAKE
        return None

    def take_all(self, wait_until: float) -> Conversation[bool]:
        """Take the keys one by one; True when one is busy. Those that are ours keep runs away while we wait on."""
        self.taken = []
        for lock in self.all_locks():
            got = yield from self.try_lock(lock)
            while not got and now() < wait_until:
                yield from self.tell_wait(wait_until)
                got = yield from self.queue(lock, wait_until)
            if not got:
                return True
            self.taken.append(lock)
        return False

    def tell_wait(self, wait_until: float) -> Conversation[None]:
        """Say once what is waited for."""
        if "wait" not in self.told:
            holders = yield from self.holders()
            if holders:
                self.told.add("wait")
                report.say(messages.waiting(self.subject, holders[0], wait_until - now()))

    # Keeping them

    def keep_for_good(self) -> Conversation[Loss]:
        """Check the keys, and take them again when they are lost; comes back when somebody ended the hold."""
        while True:
            self.loss = yield from self.keep()
            if (yield from self.retake(self.loss)):
                return self.loss
            self.since = wall_time()
            self.comment = self.facts()
            report.say(messages.hold_retaken(self.subject, self.loss, self.since))
            self.loss = None

    def keep(self) -> Conversation[Loss]:
        """Check until a check fails."""
        failing_since: float | None = None
        while True:
            try:
                yield from watch(self.session, now() + self.settings.check_interval)
                incarnation = yield from self.check()
                if incarnation is None:
                    return Loss("the lock vanished while the session lived", wall_time())
                self.incarnation, failing_since = incarnation, None
            except SessionEndedError as error:
                why = f"the server ended the session ({error.reason})"
                return Loss(why, wall_time(), error.sqlstate)
            except TimedOutError:
                return Loss(f"no answer for {self.patience:g}s", wall_time())
            except StatementError as error:  # somebody cancelled it, or the server is short of memory
                failing_since = failing_since or now()
                if now() > failing_since + self.patience:
                    return Loss(f"the check fails: {error.sqlstate}, {error.message}", wall_time())
                yield from pause(0.2)

    def check(self) -> Conversation[Incarnation | None]:
        """Ask whether all is ours still, and what the server is; None when it is not ours."""
        rows = yield from self.ask(self.comment + QUERIES["check_locks"], self.check_params(self.all_locks()))
        if rows[0] != ("t", "t"):
            return None
        rows = yield from self.ask(self.comment + QUERIES["incarnation"])
        return Incarnation(*rows[0])

    def retake(self, loss: Loss) -> Conversation[bool]:
        """Take the keys again on a new session, however long that takes; True when somebody has ended the hold."""
        lost_session = self.session
        self.told.discard("wait")
        while True:
            try:
                yield from self.explained(self.retry(loss, lost_session))
            except _ReleasedError:
                return True
            except SessionEndedError as error:
                self.tell_each(messages.hold_lost(self.subject, loss))
                loss = replace(loss, sqlstate=error.sqlstate)  # somebody may have ended the new one
                self.tell_each(messages.hold_retry(self.subject, f"the new session ended too, {error.sqlstate}"))
            except (BatchguardError, OSError, OperationalError) as error:  # the system may be short of descriptors
                self.tell_each(messages.hold_lost(self.subject, loss))
                self.tell_each(str(error))
            else:
                return False
            if self.session is not lost_session:
                self.session.close()
            yield from pause(RETAKE_PAUSE * random.uniform(0.7, 1.3))

    def retry(self, loss: Loss, lost_session: Session) -> Conversation[None]:
        """Queue for the keys, before the lost session is closed: after a silence of the network it may have them still.

        Who queues on the server gets a lock in the instant it is free, before anybody who only tries.
        """
        yield from self.open(now())
        rows = yield from self.ask(QUERIES["incarnation"])
        incarnation = Incarnation(*rows[0])
        loss = replace(loss, sqlstate=loss.sqlstate or (yield from self.last_word(lost_session)))
        if is_released(loss, self.incarnation, incarnation):
            self.session.close()
            raise _ReleasedError
        self.incarnation = incarnation
        self.taken = []
        for lock in self.all_locks():
            while not (yield from self.queue(lock, inf, lost_session.close)):
                self.tell_each(messages.hold_lost(self.subject, loss))
                yield from self.tell_wait(inf)
            self.taken.append(lock)
        self.incarnation = (yield from self.check()) or incarnation

    def last_word(self, session: Session) -> Conversation[str | None]:
        """Read what a session that fell silent has to say, now that the network is back: somebody may have ended it."""
        try:
            yield from finish_statement(session, now() + LAST_WORD)
            yield from watch(session, now() + LAST_WORD)
        except SessionEndedError as error:
            return error.sqlstate
        except (TimedOutError, OperationalError):
            pass
        return None

    def tell_each(self, message: str) -> None:
        """Say each reason once, always: nobody may be there to see how long it takes."""
        if message not in self.told:
            self.told.add(message)
            report.say(message)

    # The end

    def give_back(self) -> int:
        """Unlock, and make sure that it was ours to the end."""
        if self.taken_at is None:
            report.say(messages.never_on_hold(self.subject))
            return ExitCode.SKIPPED
        if self.loss is not None:
            report.say(messages.hold_ended_lost(self.subject, self.loss))
            return ExitCode.LOST
        held_s = (wall_time() - self.taken_at).total_seconds()
        try:
            was_held = drive(self.unlock_all(now() + min(self.patience, LONGEST_GOODBYE)), sleep)
        except (SessionEndedError, TimedOutError, StatementError):
            was_held = False
        self.session.close()
        report.say(messages.hold_ended(self.subject, held_s, was_held=was_held))
        return ExitCode.OK if was_held else ExitCode.LOST

    def unlock_all(self, until: float) -> Conversation[bool]:
        """Give the keys back, those first that were taken last; True when they were ours to the end."""
        yield from finish_statement(self.session, until)
        was_held = True
        for lock in reversed(self.taken):
            query = lock_session.lock_call(QUERIES["unlock"], lock, shared=False)
            rows = yield from execute(self.session, query, lock.numbers, until)
            was_held = was_held and rows[0][0] == "t"
        return was_held


def _start_detached(request: HoldRequest) -> int:
    """Hold in a process that outlives this login; come back once the keys are ours, or with its exit code."""
    held, tell_held = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(held)
        _be_detached(request, tell_held)
    os.close(tell_held)
    try:
        if os.read(held, 1):
            with contextlib.suppress(OSError):
                os.write(1, b"%d\n" % pid)
            return ExitCode.OK
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGINT)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else exit_code_of_signal(-code)


def _be_detached(request: HoldRequest, tell_held: int) -> NoReturn:
    """Be the process that holds; what it has to say later goes to a file, or else to the system's log."""
    os.setsid()
    code: int = ExitCode.SOFTWARE

    def leave_terminal() -> None:
        os.chdir("/")
        report.leave_terminal()
        with contextlib.suppress(OSError):  # the login, and with it who waits for this, may be gone
            os.write(tell_held, b"1")
        os.close(tell_held)

    try:
        code = _Hold(request, signals.take_over(), leave_terminal).run()
    except BatchguardError as error:
        report.say(str(error))
        code = error.exit_code
    except Exception as error:
        report.say(f"internal error: {type(error).__name__}: {error}. Please report it.")
    os._exit(code)
