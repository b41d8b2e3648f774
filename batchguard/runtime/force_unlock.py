"""`batchguard force-unlock`: free a key whose holder cannot be reached any other way."""

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf

from batchguard.adapters import lock_session, report
from batchguard.adapters.clock import now, wall_time
from batchguard.adapters.postgres import (
    Conversation,
    SessionEndedError,
    StatementError,
    TimedOutError,
    drive,
    execute,
    watch,
)
from batchguard.core import messages, refusals
from batchguard.core.errors import ConfigError, RightsError, UnreachableError
from batchguard.core.exit_codes import ExitCode
from batchguard.core.holder import Holder
from batchguard.core.keys import LockKey
from batchguard.core.messages import Subject
from batchguard.core.settings import RunSettings
from batchguard.runtime.access import LOOK, QUERIES, Access, pause
from batchguard.runtime.connection import sleep
from batchguard.runtime.hold import whoami
from batchguard.runtime.inspect import Observer

ENDS_WITHIN = 10.0
"""Seconds in which a session that was told to end should have done so."""


@dataclass(frozen=True)
class FreeRequest:
    """One key to be freed of the sessions that were shown; `others_window` in seconds."""

    lock: LockKey
    key_text: str
    dsn: str
    settings: RunSettings
    holders: tuple[Holder, ...]
    others_window: float
    at_once: bool


def verify_rights(observer: Observer, subject: Subject, holders: Sequence[Holder]) -> None:
    """Refuse at once what would fail later: nobody is to be ended before it is clear that all can be.

    Raises:
        RightsError: names the rights that are missing.
        ConfigError: a prepared transaction holds the key.
    """
    for holder in holders:
        if holder.pid is None:
            raise ConfigError(messages.held_by_prepared(subject))
        rows = observer.ask_once(LOOK["ending_rights"], [holder.pid])
        if not rows:
            continue  # it has ended by itself, which is found again when it is to be ended
        role, quoted, same_role, may_signal, may_see, is_superusers = rows[0]
        if is_superusers == "t" and same_role != "t":
            raise RightsError(messages.may_not_end(subject, holder, str(role), str(quoted), []))
        needed = {"pg_signal_backend": may_signal, "pg_read_all_stats": may_see}
        missing = [right for right, has in needed.items() if has != "t"]
        if same_role != "t" and missing:
            raise RightsError(messages.may_not_end(subject, holder, str(role), str(quoted), missing))


def force_unlock(request: FreeRequest, observer: Observer) -> int:
    """End the sessions that hold the key, keep it until what ran under it is dead, and give the exit code.

    Raises:
        BatchguardError: nobody was ended, and why.
    """
    freeing = _Freeing(request, observer)
    try:
        return freeing.run()
    finally:
        freeing.close()


class _ChangedError(Exception):
    """The holder is another one than was shown."""


class _Freeing(Access):
    """The key is queued for before its holder is ended: whoever only tries, or starts a moment later, comes second."""

    def __init__(self, request: FreeRequest, observer: Observer) -> None:
        self.request = request
        self.observer = observer
        self.host = os.uname().nodename
        self.is_open = False
        self.ended: list[Holder] = []
        self.others: list[LockKey] = []
        self.kept: list[LockKey] = []
        super().__init__(
            refusals.FREE,
            replace(request.settings, shared=False),
            request.dsn,
            [request.lock],
            request.key_text,
            lock_session.application_name("hold", request.key_text, f" {whoami()}@{self.host}"),
            waits=True,
        )

    def close(self) -> None:
        if self.is_open:
            self.session.close()

    def run(self) -> int:
        window = self.window()
        try:
            if window:
                got = drive(self.explained(self.take()), sleep)
            else:
                self.end_holders()
                got = False
        except _ChangedError:
            report.say(messages.holder_changed(self.subject, self.request.holders[0]))
            return ExitCode.SKIPPED
        except SessionEndedError as error:
            raise UnreachableError(messages.not_kept(self.subject, self.ended, error.sqlstate or "no answer")) from None
        if not got:
            return self.freed_without_us()
        if not self.ended:
            report.say(messages.already_free(self.subject))
            return ExitCode.OK
        report.say(messages.ended_session(self.subject, self.ended, window))
        return self.keep(window)

    def window(self) -> float:
        """Give how long what ran under the key may live on (seconds): under a hold there is nothing."""
        if self.request.at_once:
            return 0.0
        windows = [
            holder.window_s if holder.window_s is not None else self.request.others_window
            for holder in self.request.holders
            if holder.by != "hold"
        ]
        return max(windows, default=0.0)

    # Ending

    def take(self) -> Conversation[bool]:
        """Queue, end the holders, and have the key; False when somebody who waited longer has it."""
        yield from self.open(now())
        self.is_open = True
        until = now() + ENDS_WITHIN
        self.comment = self.facts(self.window())
        if (yield from self.queue(self.request.lock, inf, self.end_once_queued)):
            yield from self.take_others()
            return True
        while now() < until:
            holders = yield from self.holders()
            if not self.is_held_by_same(holders):
                return bool(not holders and (yield from self.try_lock(self.request.lock)))
            if (yield from self.queue(self.request.lock, inf)):
                yield from self.take_others()
                return True
        raise UnreachableError(messages.not_ended(self.subject, self.request.holders[0], ENDS_WITHIN))

    def take_others(self) -> Conversation[None]:
        """Take what else the ended sessions held, if it is free: the same batch may still be dying under it."""
        self.kept = [self.request.lock]
        for lock in self.others:
            if (yield from self.try_lock(lock)):
                self.kept.append(lock)

    def is_held_by_same(self, holders: Sequence[Holder]) -> bool:
        return bool({holder.pid for holder in holders} & {holder.pid for holder in self.request.holders})

    def end_once_queued(self) -> None:
        """End the holders as soon as the server has put us in its queue."""
        until = now() + lock_session.WAIT_SLICE / 2
        while now() < until:
            ours = [h for h in self.observer.look([self.request.lock]).holders if h.pid == self.identity.backend_pid]
            if ours and not ours[0].waits:
                return  # it came free by itself
            if ours:
                break
        self.end_holders()

    def end_holders(self) -> None:
        pids = {holder.pid for holder in self.request.holders}
        held = [one for one in self.observer.look().holders if one.pid in pids and not one.waits]
        self.others = [one.key for one in held if one.key is not None and one.key != self.request.lock]
        for holder in self.request.holders:
            columns = self.request.lock.in_pg_locks
            if self.observer.ask_once(LOOK["end_session"], [holder.pid, holder.session_start, *columns]):
                self.ended.append(holder)
        if not self.ended:
            raise _ChangedError

    def freed_without_us(self) -> int:
        """Say what became of a key that we do not keep."""
        until = now() + ENDS_WITHIN
        while self.is_held_by_same(holders := self.holders_now()):
            if now() > until:
                raise UnreachableError(messages.not_ended(self.subject, self.request.holders[0], ENDS_WITHIN))
            drive(pause(0.05), sleep)
        if holders:
            report.say(messages.taken_by_next(self.subject, holders[0]))
        else:
            report.say(messages.ended_session(self.subject, self.ended, 0.0))
        return ExitCode.OK

    def holders_now(self) -> list[Holder]:
        return [holder for holder in self.observer.look([self.request.lock]).holders if not holder.waits]

    # Keeping

    def facts(self, window: float) -> str:
        """Tell runs that are skipped meanwhile why, and until when."""
        return lock_session.comment(
            {
                "reason": "force-unlock: until what ran under it is surely dead",
                "until": (wall_time() + timedelta(seconds=window)).isoformat(timespec="seconds"),
                "since": wall_time().isoformat(timespec="milliseconds"),
                "host": self.host,
                "pid": os.getpid(),
            }
        )

    def keep(self, window: float) -> int:
        """Keep the key for the window; a closed terminal does not end that, Ctrl-C does."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        until = now() + window
        with contextlib.suppress(KeyboardInterrupt):
            try:
                drive(self.check_until(until), sleep)
            except SessionEndedError as error:
                why = f"our session was ended, {error.reason}"
                raise UnreachableError(messages.not_kept(self.subject, self.ended, why)) from None
            except (TimedOutError, StatementError):
                raise UnreachableError(messages.not_kept(self.subject, self.ended, "no good answer")) from None
            with contextlib.suppress(SessionEndedError, TimedOutError, StatementError):  # closing frees them as well
                for lock in self.kept:
                    drive(self.unlock(lock), sleep)
        self.close()
        report.say(messages.kept_long_enough(self.subject))
        return ExitCode.OK

    def check_until(self, until: float) -> Conversation[None]:
        sql = self.facts(max(0.0, until - now())) + QUERIES["check_locks"]
        while now() < until:
            rows = yield from execute(
                self.session, sql, self.check_params(self.kept), now() + self.settings.check_timeout
            )
            if rows[0] != ("t", "t"):
                raise TimedOutError("it is no longer ours")
            yield from watch(self.session, min(until, now() + self.settings.check_interval))
