"""Opening a session that may hold locks, or saying in one line why it may not; what every holder of locks needs."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NoReturn, TypeVar

from batchguard.adapters import lock_session, report
from batchguard.adapters.clock import now
from batchguard.adapters.lock_session import Identity
from batchguard.adapters.postgres import (
    ConnectFailedError,
    Conversation,
    FailedAttempt,
    Row,
    Session,
    StatementError,
    TimedOutError,
    Wait,
    connect,
    execute,
    host_text,
    load_queries,
    resolve_parameters,
    session_parameters,
)
from batchguard.core import messages, refusals
from batchguard.core.errors import BatchguardError, ConfigError, RightsError, UnreachableError
from batchguard.core.holder import Holder
from batchguard.core.keys import Key, LockKey, bigint, keys_of, order_keys
from batchguard.core.messages import Subject
from batchguard.core.refusals import Purpose
from batchguard.core.settings import RunSettings

T = TypeVar("T")

OLDEST_SERVER = 140000
SLOT_RETRY = 10.0
"""Seconds for which a server without a free connection is asked again: a storm of starts passes by itself."""

SLICE_OVER = ("55P03", "57014", "40P01")
"""lock_timeout, cancelled by somebody, deadlock: the wait goes on; any other refusal would come again at once."""

QUERIES = load_queries("lock")
LOOK = load_queries("look")


class Access:
    """The way to a session that may hold locks: it is opened, the server is judged, locks are taken on it."""

    def __init__(
        self,
        purpose: Purpose,
        settings: RunSettings,
        dsn: str,
        keys: Sequence[Key],
        key_text: str,
        application: str,
        *,
        key_from_name: str | None = None,
        waits: bool = False,
        verbose: bool = False,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            purpose: what the session is for.
            settings: of the key; the timing, and how to connect.
            dsn: the database's conninfo or URI.
            keys: what is to be locked.
            key_text: how messages call the keys.
            application: what the session calls itself.
            key_from_name: a text whose hash is one more key.
            waits: whether the functions that wait are needed too.
            verbose: whether to say why it takes long, though nobody sits at a terminal.
        """
        self.purpose = purpose
        self.settings = settings
        self.dsn = dsn
        self.written_keys = tuple(keys)
        self.keys: tuple[Key, ...] = tuple(keys)
        self.key_text = key_text
        self.key_from_name = key_from_name
        self.waits = waits
        self.verbose = verbose
        self.comment = ""
        self.told: set[str] = set()
        self.params = session_parameters(resolve_parameters(dsn), application, settings.ttl)
        database = self.params.get("dbname") or self.params.get("user") or ""
        self.subject = Subject(key_text, database_text(database, self.params), host_text(self.params))

    def refuse_server(self, why: str) -> NoReturn:
        """Say that this server does not serve."""
        raise self.unserved(why) from None

    def unserved(self, why: str) -> BatchguardError:
        """Give the line that says why this server does not serve."""
        return UnreachableError(refusals.unreachable(self.purpose, self.subject.key, self.subject.host, why))

    def explained(self, conversation: Conversation[T]) -> Conversation[T]:
        """Carry on a conversation whose failures are the end; a session that ends is another matter.

        Raises:
            BatchguardError: a line for the user.
        """
        try:
            return (yield from conversation)
        except TimedOutError:
            self.refuse_server(f"no answer within {self.patience:g}s")
        except StatementError as error:
            raise self.explain(error) from None

    def explain(self, error: StatementError) -> BatchguardError:
        """Turn what the server refused into what a user must be told."""
        if error.sqlstate == "42501":
            return RightsError(refusals.no_right(self.purpose, self.subject, error.message))
        return self.unserved(f"{error.sqlstate}, {error.message}")

    @property
    def patience(self) -> float:
        """How long one answer may take (seconds)."""
        return self.settings.check_timeout

    def ask(self, query: str, params: Sequence[object] = ()) -> Conversation[list[Row]]:
        return (yield from execute(self.session, query, params, now() + self.patience))

    def open(self, retry_until: float) -> Conversation[None]:
        """Connect and find out whether this server may guard at all."""
        self.session = yield from self.connect(retry_until)
        host = self.session.host
        database = self.session.pgconn.db.decode("utf-8", "replace")
        self.subject = Subject(self.key_text, database_text(database, self.session.params), host)
        version = self.session.pgconn.server_version
        if version < OLDEST_SERVER:
            raise ConfigError(refusals.server_too_old(self.purpose, self.subject.key, host, version))
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
        if about not in self.told and (self.verbose or report.is_terminal()):
            self.told.add(about)
            report.say(message, self.settings.log_format)

    def refuse_connection(self, attempts: Sequence[FailedAttempt]) -> NoReturn:
        """Say in one line why no server can be used, the most telling reason first."""
        key = self.subject.key
        for attempt in attempts:
            if attempt.needs_password or (attempt.sqlstate or "").startswith(("28", "42501")):
                raise RightsError(refusals.login_refused(self.purpose, key, attempt.host, attempt.why))
            if attempt.sqlstate == "3D000":
                raise ConfigError(refusals.no_such_database(self.purpose, key, attempt.host, attempt.why))
        for attempt in attempts:
            if attempt.sqlstate == "53200":
                full = Subject(key, self.subject.database, attempt.host)
                raise UnreachableError(refusals.lock_table_full(self.purpose, full))
            if attempt.sqlstate == "53300":
                raise UnreachableError(refusals.no_slot(self.purpose, key, attempt.host, SLOT_RETRY))
        hosts = ", ".join(dict.fromkeys(attempt.host for attempt in attempts))
        if all(attempt.standby for attempt in attempts):
            raise ConfigError(refusals.standby(self.purpose, Subject(key, self.subject.database, hosts)))
        why = "; ".join(dict.fromkeys(attempt.why for attempt in attempts))
        named = bool(self.dsn) or any(name in os.environ for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE"))
        raise UnreachableError(refusals.unreachable(self.purpose, key, hosts, why, named=named))

    def identify(self) -> Conversation[None]:
        """Learn who serves us; refuse poolers, standbys, missing rights and platforms that give up too early."""
        written = [lock for key in self.written_keys for lock in keys_of(key)]
        if self.key_from_name is not None:
            written.append(bigint(0))
        functions = lock_session.lock_functions(written, self.settings.shared, waits=self.waits)
        rows = yield from self.ask(QUERIES["identify"], [functions, self.key_from_name])
        self.identity = lock_session.read_identity(rows[0])
        self.subject = Subject(
            self.key_text, database_text(self.identity.database, self.session.params), self.session.host
        )
        if self.identity.in_recovery:
            raise ConfigError(refusals.standby(self.purpose, self.subject))
        if self.session.pgconn.backend_pid != self.identity.backend_pid and not self.settings.allow_pooler:
            raise ConfigError(refusals.pooler(self.purpose, self.subject))
        if self.identity.lacks is not None:
            signature = self.identity.lacks
            role, quoted = self.identity.role, self.identity.quoted_role
            raise RightsError(refusals.no_execute_right(self.purpose, role, quoted, self.subject.database, signature))
        server_ttl, window = self.identity.server_ttl, self.settings.timing.window
        if server_ttl is not None and server_ttl <= window:
            raise ConfigError(refusals.short_ttl(self.purpose, self.subject, server_ttl, window))
        if self.identity.name_hash is not None:
            hashed = bigint(self.identity.name_hash)
            self.keys = order_keys((*self.written_keys, hashed))
            self.subject = Subject(f"{hashed} {self.key_text}", self.subject.database, self.subject.host)

    # Locks

    def all_locks(self) -> list[LockKey]:
        """Give every lock that the keys may lead to."""
        return [lock for key in self.keys for lock in keys_of(key)]

    def try_lock(self, lock: LockKey) -> Conversation[bool]:
        query = lock_session.lock_call(QUERIES["try_lock"], lock, self.settings.shared, first_parameter=5)
        rows = yield from self.lock_statement(query, [self.identity.database_oid, *lock.in_pg_locks, *lock.numbers])
        mine, pid, got = rows[0]
        if mine == "t" or int(pid or 0) != self.identity.backend_pid:
            raise ConfigError(refusals.pooler(self.purpose, self.subject))
        return got == "t"

    def queue(
        self, lock: LockKey, wait_until: float, once_sent: Callable[[], None] = lambda: None
    ) -> Conversation[bool]:
        """Wait in PostgreSQL's own queue for one slice; True when the lock is ours.

        A slice that ends with any error may still have got the lock, so the next try looks
        whether it is ours before it asks again.
        """
        slice_s = min(lock_session.WAIT_SLICE, max(0.001, wait_until - now()))
        query = self.comment + lock_session.lock_call(QUERIES["wait_lock"], lock, self.settings.shared)
        yield from self.ask(QUERIES["limit_waiting"], [f"{slice_s * 1000:.0f}ms"])
        try:
            waiting = execute(self.session, query, lock.numbers, now() + slice_s + self.patience)
            yield from _act_once_sent(waiting, once_sent)
            got = True
        except StatementError as error:
            if error.sqlstate == "53200":
                raise UnreachableError(refusals.lock_table_full(self.purpose, self.subject)) from None
            if error.sqlstate not in SLICE_OVER:
                raise
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

    def lock_statement(self, query: str, params: Sequence[object]) -> Conversation[list[Row]]:
        try:
            return (yield from self.ask(query, params))
        except StatementError as error:
            if error.sqlstate == "53200":
                raise UnreachableError(refusals.lock_table_full(self.purpose, self.subject)) from None
            raise

    def holders(self) -> Conversation[list[Holder]]:
        """Ask who holds our locks, oldest first; who waits for them is left out."""
        rows = yield from self.ask(LOOK["locks"], lock_session.key_columns(self.all_locks()))
        found = [lock_session.read_holder(row) for row in rows]
        return [holder for holder in found if not holder.waits]


def check_params(identity: Identity, locks: Sequence[LockKey], shared: bool) -> list[object]:
    """Give the parameters of `check_locks` and `busy_locks`."""
    return [identity.database_oid, *lock_session.key_columns(locks), lock_session.lock_mode(shared)]


def pause(seconds: float) -> Conversation[None]:
    """Wait without anything to watch."""
    yield Wait(-1, 0, now() + seconds)


def database_text(database: str, params: Mapping[str, str]) -> str:
    """Name a database and its server, as messages do."""
    return f'"{database}" on {host_text(params)}'


def _act_once_sent(conversation: Conversation[T], act: Callable[[], None]) -> Conversation[T]:
    """Carry on a conversation, and do something between what it says first and the answer."""
    try:
        wait = next(conversation)
        act()
        while True:
            wait = conversation.send((yield wait))
    except StopIteration as end:
        result: T = end.value
        return result


def _is_final(attempts: Sequence[FailedAttempt]) -> bool:
    """Tell whether trying again cannot help: a wrong password stays wrong."""
    return all(
        attempt.needs_password or (attempt.sqlstate or "").startswith(("28", "3D", "42")) for attempt in attempts
    )
