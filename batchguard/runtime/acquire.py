"""Getting the lock: connect, refuse what cannot be guarded, take the keys, make the token, decide the settling."""

import os
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NoReturn

from batchguard.adapters import lock_session, report
from batchguard.adapters.clock import now, wall_time
from batchguard.adapters.lock_session import Identity
from batchguard.adapters.postgres import (
    ConnectFailedError,
    Conversation,
    FailedAttempt,
    Row,
    Session,
    SessionEndedError,
    StatementError,
    TimedOutError,
    Wait,
    connect,
    execute,
    host_text,
    load_queries,
    notifications,
    resolve_parameters,
    session_parameters,
)
from batchguard.core import messages
from batchguard.core.errors import ConfigError, RightsError, UnreachableError
from batchguard.core.keys import Key, KeyRange, LockKey, bigint, keys_of, order_keys
from batchguard.core.messages import Holder, Subject
from batchguard.core.settings import RunRequest
from batchguard.core.settle import ServerAge, SettleDecision, decide_settle
from batchguard.core.timing import verify_timing

OLDEST_SERVER = 140000
SLOT_RETRY = 10.0
"""Seconds for which a server without a free connection is asked again: a storm of starts passes by itself."""
SEVERAL_RETRY = 1.0
"""Seconds for which several keys are tried again: two runs may each see a lock that the other is about to give back."""

RELEASED = "released"
"""What a run that gives its locks back announces; one that takes them announces their keys."""
QUERIES = load_queries("lock")


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
    return (yield from _Acquisition(request, about, want_holder, outer).run())


class _Acquisition:
    """One attempt to get the lock; holds what its steps share."""

    def __init__(
        self, request: RunRequest, about: Mapping[str, Any], want_holder: bool, outer: Mapping[str, str]
    ) -> None:
        self.request = request
        self.settings = request.settings
        self.about = about
        self.want_holder = want_holder
        self.outer = outer
        self.params = session_parameters(
            resolve_parameters(request.dsn), f"batchguard run {request.key_text}@{about['host']}", self.settings.ttl
        )
        self.began = now()
        self.others_window = request.others_window
        self.told: set[str] = set()
        self.ahead: set[int] = set()
        self.released: set[int] = set()
        self.is_listening = False
        self.keys: tuple[Key, ...] = request.keys
        database = self.params.get("dbname") or self.params.get("user") or ""
        self.subject = Subject(request.key_text, _database_text(database, self.params), host_text(self.params))

    def run(self) -> Conversation[Held | Skipped]:
        retry_until = self.began + self.settings.connect_retry
        wait_until = -inf
        while True:
            try:
                yield from self.open(retry_until)
                if wait_until == -inf:  # the first time: to wait is to wait for the lock
                    self.began = now()
                    wait_until = self.began + self.settings.wait
                locks = yield from self.take(wait_until)
                if locks is None:
                    return (yield from self.skipped())
                return (yield from self.held(locks))
            except TimedOutError:
                self.refuse_server(f"no answer within {self.patience:g}s")
            except StatementError as error:
                if error.sqlstate == "42501":
                    raise RightsError(messages.no_right(self.subject, error.message)) from None
                self.refuse_server(f"{error.sqlstate}, {error.message}")
            except SessionEndedError as error:
                # A server that restarts while we queue ends the session, not the wait.
                retry_until = max(retry_until, min(wait_until, now() + 3600))
                if now() >= retry_until:
                    self.refuse_server(f"the server ended the session, {error.sqlstate or 'connection closed'}")

    def refuse_server(self, why: str) -> NoReturn:
        """Say that this server does not serve."""
        raise UnreachableError(messages.unreachable(self.subject.key, self.subject.host, why)) from None

    @property
    def patience(self) -> float:
        return self.settings.check_timeout

    def ask(self, query: str, params: Sequence[object] = ()) -> Conversation[list[Row]]:
        return (yield from execute(self.session, query, params, now() + self.patience))

    def open(self, retry_until: float) -> Conversation[None]:
        """Connect and find out whether this server may guard at all."""
        self.session = yield from self.connect(retry_until)
        host = self.session.host
        database = self.session.pgconn.db.decode("utf-8", "replace")
        self.subject = Subject(self.request.key_text, _database_text(database, self.session.params), host)
        version = self.session.pgconn.server_version
        if version < OLDEST_SERVER:
            raise ConfigError(messages.server_too_old(self.subject.key, host, version))
        self.is_listening = False
        yield from self.ask(QUERIES["prepare_session"], lock_session.keepalive_settings(self.settings.ttl))
        yield from self.identify()

    def connect(self, retry_until: float) -> Conversation[Session]:
        slots_until = now() + SLOT_RETRY
        while True:
            try:
                return (yield from connect(self.params, self.settings.connect_timeout))
            except ConnectFailedError as error:
                no_slot = any(attempt.sqlstate == "53300" for attempt in error.attempts)
                until = max(slots_until if no_slot else -inf, retry_until)
                if now() >= until or _is_final(error.attempts):
                    self.refuse_connection(error.attempts)
                last = error.attempts[-1]
                self.tell_once("retry", messages.retrying(last.host, last.why, until - now()))
                yield from pause(random.uniform(0.1, 0.5))

    def tell_once(self, about: str, message: str) -> None:
        """Tell a person, once, why it takes so long."""
        if about not in self.told and (self.request.verbose or report.is_terminal()):
            self.told.add(about)
            report.say(message, self.settings.log_format)

    def refuse_connection(self, attempts: Sequence[FailedAttempt]) -> NoReturn:
        """Say in one line why no server can be used, the most telling reason first."""
        key = self.subject.key
        for attempt in attempts:
            if attempt.needs_password or (attempt.sqlstate or "").startswith(("28", "42501")):
                raise RightsError(messages.login_refused(key, attempt.host, attempt.why))
            if attempt.sqlstate == "3D000":
                raise ConfigError(messages.no_such_database(key, attempt.host, attempt.why))
        for attempt in attempts:
            if attempt.sqlstate == "53200":
                raise UnreachableError(messages.lock_table_full(Subject(key, self.subject.database, attempt.host)))
            if attempt.sqlstate == "53300":
                raise UnreachableError(messages.no_slot(key, attempt.host, SLOT_RETRY))
        hosts = ", ".join(dict.fromkeys(attempt.host for attempt in attempts))
        if all(attempt.standby for attempt in attempts):
            raise ConfigError(messages.standby(Subject(key, self.subject.database, hosts)))
        why = "; ".join(dict.fromkeys(attempt.why for attempt in attempts))
        named = bool(self.request.dsn) or any(name in os.environ for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE"))
        raise UnreachableError(messages.unreachable(key, hosts, why, named=named))

    def identify(self) -> Conversation[None]:
        """Learn who serves us; refuse poolers, standbys, missing rights and platforms that give up too early."""
        written = [lock for key in self.request.keys for lock in keys_of(key)]
        if self.request.key_from_name is not None:
            written.append(bigint(0))
        functions = lock_session.lock_functions(written, self.settings.shared, waits=self.settings.wait > 0)
        rows = yield from self.ask(QUERIES["identify"], [functions, self.request.key_from_name])
        self.identity = lock_session.read_identity(rows[0])
        self.subject = Subject(
            self.request.key_text, _database_text(self.identity.database, self.session.params), self.session.host
        )
        if self.identity.in_recovery:
            raise ConfigError(messages.standby(self.subject))
        if self.session.pgconn.backend_pid != self.identity.backend_pid and not self.settings.allow_pooler:
            raise ConfigError(messages.pooler(self.subject))
        if self.identity.lacks is not None:
            signature = self.identity.lacks
            role, quoted = self.identity.role, self.identity.quoted_role
            raise RightsError(messages.no_execute_right(role, quoted, self.subject.database, signature))
        if self.identity.server_ttl is not None and self.identity.server_ttl <= self.settings.timing.window:
            raise ConfigError(messages.short_ttl(self.subject, self.identity.server_ttl, self.settings.timing.window))
        if self.identity.name_hash is not None:
            hashed = bigint(self.identity.name_hash)
            self.keys = order_keys((*self.request.keys, hashed))
            self.subject = Subject(f"{hashed} {self.request.key_text}", self.subject.database, self.subject.host)

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
        """Try every key in order; on the first that is busy give back what was taken, and say which it was."""
        taken: list[LockKey] = []
        busy = yield from self.busy_locks() if len(self.keys) > 1 or isinstance(self.keys[0], KeyRange) else _no_locks()
        for key in self.keys:
            lock = yield from self.try_key(key, queued, busy)
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

    def try_lock(self, lock: LockKey) -> Conversation[bool]:
        query = lock_session.lock_call(QUERIES["try_lock"], lock, self.settings.shared, first_parameter=5)
        rows = yield from self.lock_statement(query, [self.identity.database_oid, *lock.in_pg_locks, *lock.numbers])
        mine, pid, got = rows[0]
        if mine == "t" or int(pid or 0) != self.identity.backend_pid:
            raise ConfigError(messages.pooler(self.subject))
        return got == "t"

    def queue(self, lock: LockKey, wait_until: float) -> Conversation[bool]:
        """Wait in PostgreSQL's own queue for one slice; True when the lock is ours.

        A slice that ends with any error may still have got the lock, so the next try looks
        whether it is ours before it asks again.
        """
        slice_s = min(lock_session.WAIT_SLICE, max(0.001, wait_until - now()))
        query = lock_session.lock_call(QUERIES["wait_lock"], lock, self.settings.shared)
        yield from self.ask(QUERIES["limit_waiting"], [f"{slice_s * 1000:.0f}ms"])
        try:
            yield from execute(self.session, query, lock.numbers, now() + slice_s + self.patience)
            got = True
        except StatementError as error:
            if error.sqlstate == "53200":
                raise UnreachableError(messages.lock_table_full(self.subject)) from None
            got = yield from self.holds([lock])
        yield from self.ask(QUERIES["limit_waiting"], ["0"])
        return got

    def holds(self, locks: Sequence[LockKey]) -> Conversation[bool]:
        rows = yield from self.ask(QUERIES["check_locks"], self.check_params(locks))
        return rows[0] == ("t", "t")

    def check_params(self, locks: Sequence[LockKey]) -> list[object]:
        return check_params(self.identity, locks, self.settings.shared)

    def unlock(self, lock: LockKey) -> Conversation[None]:
        yield from self.ask(lock_session.lock_call(QUERIES["unlock"], lock, self.settings.shared), lock.numbers)

    def busy_locks(self) -> Conversation[frozenset[LockKey]]:
        locks = self.all_locks()
        by_columns = {lock.in_pg_locks: lock for lock in locks}
        rows = yield from self.ask(QUERIES["busy_locks"], self.check_params(locks))
        columns = ((int(a or 0), int(b or 0), int(c or 0)) for a, b, c in rows)
        return frozenset(by_columns[column] for column in columns if column in by_columns)

    def all_locks(self) -> list[LockKey]:
        return [lock for key in self.keys for lock in keys_of(key)]

    def lock_statement(self, query: str, params: Sequence[object]) -> Conversation[list[Row]]:
        try:
            return (yield from self.ask(query, params))
        except StatementError as error:
            if error.sqlstate == "53200":
                raise UnreachableError(messages.lock_table_full(self.subject)) from None
            raise

    # What follows

    def holders(self) -> Conversation[list[Holder]]:
        columns = lock_session.key_columns(self.all_locks())
        rows = yield from self.ask(QUERIES["holders"], [self.identity.database_oid, *columns])
        return [lock_session.read_holder(row) for row in rows]

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
        """Remember which runs have the lock before us, and forget those that had it until now."""
        self.released.clear()
        self.hear()  # a run that is about to give its lock back has said so already
        if locks := self.waited_for():
            rows = yield from self.ask(QUERIES["rivals"], self.check_params(locks))
            self.ahead = {int(row[0] or 0) for row in rows}

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
        facts = {**self.about, "since": self.taken_at, "key": self.subject.key, "window_s": self.settings.timing.window}
        check_sql = lock_session.comment(facts) + QUERIES["check_locks"]
        checked_at = now()
        rows = yield from self.ask(check_sql, self.check_params(locks))
        if rows[0] != ("t", "t"):
            raise ConfigError(messages.pooler(self.subject))
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
            raise UnreachableError(messages.token_unconfirmed(self.subject, why)) from None
        except StatementError as error:
            raise UnreachableError(messages.token_unconfirmed(self.subject, error.message)) from None
        if self.session.warnings:
            raise UnreachableError(messages.token_unconfirmed(self.subject, self.session.warnings[0]))
        return str(rows[0][0])


def check_params(identity: Identity, locks: Sequence[LockKey], shared: bool) -> list[object]:
    """Give the parameters of `check_locks` and `busy_locks`."""
    return [identity.database_oid, *lock_session.key_columns(locks), lock_session.lock_mode(shared)]


def pause(seconds: float) -> Conversation[None]:
    """Wait without anything to watch."""
    yield Wait(-1, 0, now() + seconds)


def _no_locks() -> Generator[Wait, int, frozenset[LockKey]]:
    return frozenset()
    yield  # makes this a conversation, one that asks nothing


def _slot(keys: Sequence[Key], locks: Sequence[LockKey]) -> int | None:
    """Give the number of the first range's lock: it tells parallel runs apart."""
    for key, lock in zip(keys, locks, strict=True):
        if isinstance(key, KeyRange):
            return lock.numbers[1]
    return None


def _database_text(database: str, params: Mapping[str, str]) -> str:
    return f'"{database}" on {host_text(params)}'


def _is_final(attempts: Sequence[FailedAttempt]) -> bool:
    """Tell whether trying again cannot help: a wrong password stays wrong."""
    return all(
        attempt.needs_password or (attempt.sqlstate or "").startswith(("28", "3D", "42")) for attempt in attempts
    )
