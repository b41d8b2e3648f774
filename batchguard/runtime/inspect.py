"""Looking at locks without taking any: trying whether a lock is free would make a run that starts just then skip."""

import contextlib
import select
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from batchguard.adapters import lock_session
from batchguard.adapters.clock import now
from batchguard.adapters.postgres import Conversation, Row, SessionEndedError, Wait, drive
from batchguard.core import refusals
from batchguard.core.errors import BatchguardError
from batchguard.core.holder import Holder
from batchguard.core.keys import LockKey, bigint
from batchguard.core.messages import Subject
from batchguard.core.settings import RunSettings
from batchguard.runtime.access import LOOK, Access, database_text

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds for the connection and for each answer: somebody sits there and waits."""


@dataclass(frozen=True)
class Seen:
    """The advisory locks of one database at one moment; `place` names database and server in a sentence."""

    database: str
    server: str
    place: str
    holders: tuple[Holder, ...]
    hashed: LockKey | None = None
    """The key that a name stands for, where it was asked for by name."""


class Observer(Access):
    """Looks over one connection as often as it is asked; a pooler may sit in between."""

    def __init__(self, dsn: str, command: str, patience: float = PATIENCE) -> None:
        """Prepare; the connection is opened by the first look.

        Raises:
            ConfigError: the DSN does not read.
        """
        settings = RunSettings(connect_timeout=patience, check_timeout=patience)
        super().__init__(refusals.LOOK, settings, dsn, (), "the locks", f"batchguard {command}")
        self.is_connected = False

    def look(self, keys: Sequence[LockKey] | None = None, key_from_name: str | None = None) -> Seen:
        """List all locks, or those of these keys; `key_from_name` is a text whose hash is one more.

        Raises:
            BatchguardError: the server cannot be reached, or does not serve.
        """
        return self.drive(self._look(keys, key_from_name))

    def ask_once(self, query: str, params: Sequence[object]) -> list[Row]:
        """Ask one thing on the same connection.

        Raises:
            BatchguardError: the server cannot be reached, or refuses.
        """
        return self.drive(self._ask_once(query, params))

    def _ask_once(self, query: str, params: Sequence[object]) -> Conversation[list[Row]]:
        yield from self.prepared()
        rows = yield from self.ask(query, params)
        yield from self.ask(LOOK["end_look"])
        return rows

    def drive(self, conversation: Conversation[T]) -> T:
        """Carry on one conversation to its end; after a failure the next one opens a new connection.

        Raises:
            BatchguardError: a line for the user.
        """
        try:
            return drive(self.explained(conversation), sleep)
        except SessionEndedError as error:
            self.close()
            self.refuse_server(f"the server ended the session, {error.reason}")
        except BatchguardError:
            self.close()
            raise

    def close(self) -> None:
        """End the connection, if there is one."""
        if self.is_connected:
            self.is_connected = False
            self.session.close()

    def prepared(self) -> Conversation[None]:
        """Connect where needed, and begin a transaction in which names mean what they should."""
        if not self.is_connected:
            self.session = yield from self.connect(now())
            database = self.session.pgconn.db.decode("utf-8", "replace")
            text = database_text(database, self.session.params)
            self.subject = Subject(self.key_text, text, self.session.host)
            self.is_connected = True
        yield from self.ask(LOOK["begin_look"])
        yield from self.ask(LOOK["prepare_look"], [f"{self.patience * 1000:.0f}ms"])

    def _look(self, keys: Sequence[LockKey] | None, key_from_name: str | None) -> Conversation[Seen]:
        yield from self.prepared()
        wanted = list(keys or ())
        hashed = None
        if key_from_name is not None:
            rows = yield from self.ask(LOOK["hash_name"], [key_from_name])
            hashed = bigint(int(rows[0][0] or 0))
            wanted.append(hashed)
        columns: Sequence[object] = lock_session.key_columns(wanted) if wanted else (None, None, None)
        rows = yield from self.ask(LOOK["locks"], columns)
        yield from self.ask(LOOK["end_look"])
        database = self.session.pgconn.db.decode("utf-8", "replace")
        holders = tuple(lock_session.read_holder(row) for row in rows)
        return Seen(database, self.session.host, self.subject.database, holders, hashed)


def sleep(wait: Wait) -> int:
    """Sleep for a conversation, with nothing else to watch."""
    poll = select.poll()
    if wait.fd >= 0:
        poll.register(wait.fd, wait.events)
    ready = dict(poll.poll(min(1.0, max(0.0, wait.until - now())) * 1000 + 1))
    return ready.get(wait.fd, 0)


def look_once(dsn: str, command: str, keys: Sequence[LockKey]) -> Seen:
    """Look once at these keys.

    Raises:
        BatchguardError: the server cannot be reached, or does not serve.
    """
    with contextlib.closing(Observer(dsn, command)) as observer:
        return observer.look(keys)
