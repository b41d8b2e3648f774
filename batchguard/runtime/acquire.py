"""Getting the lock: connect, refuse what cannot be guarded, take the keys, make the token, decide the settling."""

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from batchguard.adapters import lock_session
from batchguard.adapters.clock import now, wall_time
from batchguard.adapters.lock_session import Identity
from batchguard.adapters.postgres import (
    Conversation,
    Session,
    SessionEndedError,
    StatementError,
    TimedOutError,
    Wait,
    notifications,
)
from batchguard.core import messages, refusals
from batchguard.core.errors import ConfigError, UnreachableError
from batchguard.core.holder import Holder
from batchguard.core.keys import Key, KeyRange, LockKey, keys_of
from batchguard.core.messages import Subject
from batchguard.core.settings import RunRequest
from batchguard.core.settle import ServerAge, SettleDecision, decide_settle
from batchguard.core.timing import verify_timing
from batchguard.runtime.access import QUERIES, Access, pause

SEVERAL_RETRY = 1.0
"""Seconds for which several keys are tried again: two runs may each see a lock that the other is about to give back."""

RELEASED = "released"
"""What a run that gives its locks back announces; one that takes them announces their keys."""


@dataclass(frozen=True)
class Held:
    """The lock is ours, its session lives, and the server confirmed it at `checked_at`."""

    session: Session
    identity: Identity
    subject: Subject
    locks: tuple[LockKey, ...]
    slot: int | None
    token: str
    check_sql: str
    checked_at: float
    settle: SettleDecision
    waited_s: float


@dataclass(frozen=True)
class Skipped:
    """Somebody else holds the lock; `holder` None when it was gone by the time we looked."""

    subject: Subject
    identity: Identity
    holder: Holder | None
    inside_itself: bool
    waited_s: float


def acquire(
    request: RunRequest, about: Mapping[str, Any], want_holder: bool, outer: Mapping[str, str]
) -> Conversation[Held | Skipped]:
    """Get everything that must be true before the command may start.

    Args:
        request: what the user asked for.
        about: what this session tells about itself in pg_stat_activity.
        want_holder: whether somebody will be told who holds the lock.
        outer: the BATCHGUARD_ variables, without that prefix, of a run that this one was started in.

    Raises:
        BatchguardError: why the command must not start, and what to do.
    """
    verify_timing(request.settings.timing)
    return (yield from Acquisition(request, about, want_holder, outer).run())


class Acquisition(Access):
    """One attempt to get the lock; holds what its steps share."""

    def __init__(
        self, request: RunRequest, about: Mapping[str, Any], want_holder: bool, outer: Mapping[str, str]
    ) -> None:
        """Prepare; see `acquire`."""
        super().__init__(
            refusals.RUN,
            request.settings,
            request.dsn,
            request.keys,
            request.key_text,
            lock_session.application_name("run", request.key_text, f"@{about['host']}"),
            key_from_name=request.key_from_name,
            waits=request.settings.wait > 0,
            verbose=request.verbose,
        )
        self.about = about
        self.want_holder = want_holder
        self.outer = outer
        self.began = now()
        self.comment = lock_session.comment({**about, "since": wall_time().isoformat(timespec="milliseconds")})
        self.others_window = request.others_window
        self.ahead: set[int] = set()
        self.released: set[int] = set()
        self.is_listening = False

    def run(self) -> Conversation[Held | Skipped]:
        retry_until = self.began + self.settings.connect_retry
        wait_until = -inf
        while True:
            try:
                self.is_listening = False
                yield from self.explained(self.open(retry_until))
                if wait_until == -inf:  # the first time: to wait is to wait for the lock
                    self.began = now()
                    wait_until = self.began + self.settings.wait
                return (yield from self.explained(self.get(wait_until)))
            except SessionEndedError as error:
                # A server that restarts while we queue ends the session, not the wait.
                retry_until = max(retry_until, min(wait_until, now() + 3600))
                if now() >= retry_until:
                    self.refuse_server(f"the server ended the session, {error.reason}")

    def get(self, wait_until: float) -> Conversation[Held | Skipped]:
        locks = yield from self.take(wait_until)
        if locks is None:
            return (yield from self.skipped())
        return (yield from self.held(locks))

    # Taking the keys

    def take(self, wait_until: float) -> Conversation[tuple[LockKey, ...] | None]:
        """Take every key, or none and give None; queue where a wait was asked for."""
        patient_until = max(wait_until, self.began + SEVERAL_RETRY if len(self.keys) > 1 else -inf)
        queued: LockKey | None = None
        while True:
            locks, busy = yield from self.try_all(queued)
            if busy is None:
                return locks
            queued = None
            if now() >= patient_until or (yield from self.note_holders()):
                return None
            if now() < wait_until and isinstance(busy, LockKey):
                if (yield from self.queue(busy, wait_until)):
                    queued = busy
            else:
                yield from pause(min(random.uniform(0.05, 0.2), max(0.0, patient_until - now())))

    def try_all(self, queued: LockKey | None) -> Conversation[tuple[tuple[LockKey, ...], Key | None]]:
        """Try every key in order; on the first that is busy give back what was taken, and say which it was.

        Where one is seen to be busy none is taken: another run would be skipped for what we only give back again.
        """
        taken: list[LockKey] = []
        busy = yield from self.busy_locks() if len(self.keys) > 1 or isinstance(self.keys[0], KeyRange) else _no_locks()
        hopeless = [key for key in self.keys if busy.issuperset(keys_of(key))]
        for key in hopeless or self.keys:
            lock = None if hopeless else (yield from self.try_key(key, queued, busy))
            if lock is None:
                if taken or queued:
                    yield from self.ask(QUERIES["announce"], [RELEASED])  # nothing was started under these
                for other in {*taken, queued} - {None}:
                    yield from self.unlock(other)  # type: ignore[arg-type]  # None was taken out
                return (), key
            taken.append(lock)
        return tuple(taken), None

    def try_key(self, key: Key, queued: LockKey | None, busy: frozenset[LockKey]) -> Conversation[LockKey | None]:
        for lock in keys_of(key):
            if lock == queued:
                return lock
            if lock not in busy and (yield from self.try_lock(lock)):
                return lock
        return None

    def busy_locks(self) -> Conversation[frozenset[LockKey]]:
        locks = self.all_locks()
        by_columns = {lock.in_pg_locks: lock for lock in locks}
        rows = yield from self.ask(QUERIES["busy_locks"], self.check_params(locks))
        columns = ((int(a or 0), int(b or 0), int(c or 0)) for a, b, c in rows)
        return frozenset(by_columns[column] for column in columns if column in by_columns)

    # What follows

    def note_holders(self) -> Conversation[bool]:
        """Remember the window of whoever holds the lock now: its tree may outlive its lock by that much.

        True when it is the run that we were started in: to wait for that is to wait for ever.
        """
        if not self.is_listening:
            self.is_listening = True
            yield from self.ask(QUERIES["listen"])
        yield from self.note_rivals()
        holders = yield from self.holders()
        for holder in holders:
            self.others_window = max(self.others_window, holder.window_s or 0.0)
        if holders and self.settings.wait > 0:
            self.tell_once("wait", messages.waiting(self.subject, holders[0], self.settings.wait))
        return self.is_inside(holders)

    def note_rivals(self) -> Conversation[None]:
        """Remember which runs have the lock before us, and forget those that have said that they gave it back.

        Who is gone without a word stays: it may have been ended between two of our looks, with its tree still alive.
        """
        gone = set(self.released)
        self.released.clear()
        self.hear()  # a run that is about to give its lock back has said so already
        if locks := self.waited_for():
            rows = yield from self.ask(QUERIES["rivals"], self.check_params(locks))
            self.ahead = self.ahead - gone - self.released | {int(row[0] or 0) for row in rows}

    def waited_for(self) -> list[LockKey]:
        """Give the locks that we queue for; of a range, the runs that we waited for may go on in their own slots."""
        return [lock for key in self.keys if not isinstance(key, KeyRange) for lock in keys_of(key)]

    def hear(self) -> None:
        """Note who has taken one of our locks meanwhile, and who has given back what it had."""
        ours = {str(lock) for lock in self.waited_for()}
        for pid, payload in notifications(self.session):
            if payload == RELEASED:
                self.released.add(pid)
            elif pid != self.identity.backend_pid and ours & set(payload.split()):
                self.ahead.add(pid)
                self.released.discard(pid)

    def is_inside(self, holders: Sequence[Holder]) -> bool:
        """Tell whether one of these is the run that this one was started in."""
        return self.outer.get("SYSTEM_ID") == self.identity.system_id and any(
            str(holder.pid) == self.outer.get("LOCK_PID") for holder in holders
        )

    def skipped(self) -> Conversation[Skipped]:
        holders = []
        if self.want_holder or self.outer:
            holders = yield from self.holders()
        self.session.close()
        inside, first = self.is_inside(holders), holders[0] if holders else None
        return Skipped(self.subject, self.identity, first, inside, now() - self.began)

    def held(self, locks: tuple[LockKey, ...]) -> Conversation[Held]:
        waited_s = now() - self.began
        self.taken_at = wall_time().isoformat(timespec="milliseconds")
        token = yield from self.take_token(locks)
        # Whoever queues has the lock the instant it is free, before any shield can be raised.
        self.hear()
        abandoned = bool(self.ahead - self.released)
        if self.is_listening:
            yield from self.ask(QUERIES["unlisten"])
        age = ServerAge()
        if self.settings.settle == "auto":
            age = lock_session.read_server_age((yield from self.ask(QUERIES["server_age"]))[0])
        window = max(self.settings.timing.window, self.others_window)
        settle = decide_settle(self.settings.settle, age, window, window if abandoned else None)
        slot = _slot(self.keys, locks)
        facts = {**self.about, "since": self.taken_at, **lock_session.timing_facts(self.settings.timing)}
        check_sql = lock_session.comment(facts) + QUERIES["check_locks"]
        checked_at = now()
        rows = yield from self.ask(check_sql, self.check_params(locks))
        if rows[0] != ("t", "t"):
            raise ConfigError(refusals.pooler(self.purpose, self.subject))
        return Held(
            session=self.session,
            identity=self.identity,
            subject=self.subject,
            locks=locks,
            slot=slot,
            token=token,
            check_sql=check_sql,
            checked_at=checked_at,
            settle=settle,
            waited_s=waited_s,
        )

    def take_token(self, locks: Sequence[LockKey]) -> Conversation[str]:
        """Make the fencing token, one that is not surely durable is none; and tell others that we have the locks."""
        try:
            yield from self.ask(QUERIES["begin_token"])
            yield from self.ask(QUERIES["announce"], [" ".join(map(str, locks))])
            rows = yield from self.ask(QUERIES["take_token"])
            yield from self.ask(QUERIES["commit_token"])
        except TimedOutError:
            why = f"its commit was not confirmed within {self.patience:g}s"
            raise UnreachableError(refusals.token_unconfirmed(self.subject, why)) from None
        except StatementError as error:
            raise UnreachableError(refusals.token_unconfirmed(self.subject, error.message)) from None
        if self.session.warnings:
            raise UnreachableError(refusals.token_unconfirmed(self.subject, self.session.warnings[0]))
        return str(rows[0][0])


def _no_locks() -> Generator[Wait, int, frozenset[LockKey]]:
    return frozenset()
    yield  # makes this a conversation, one that asks nothing


def _slot(keys: Sequence[Key], locks: Sequence[LockKey]) -> int | None:
    """Give the number of the first range's lock: it tells parallel runs apart."""
    for key, lock in zip(keys, locks, strict=True):
        if isinstance(key, KeyRange):
            return lock.numbers[1]
    return None
