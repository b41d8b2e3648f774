"""Looking at locks without taking any: trying whether a lock is free would make a run that starts just then skip."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from batchguard.adapters import lock_session
from batchguard.adapters.postgres import Conversation, Row
from batchguard.core import refusals
from batchguard.core.holder import Holder
from batchguard.core.keys import LockKey, bigint
from batchguard.runtime.access import LOOK
from batchguard.runtime.connection import PATIENCE, Connection


@dataclass(frozen=True)
class Seen:
    """The advisory locks of one database at one moment; `place` names database and server in a sentence."""

    database: str
    server: str
    place: str
    holders: tuple[Holder, ...]
    hashed: LockKey | None = None
    """The key that a name stands for, where it was asked for by name."""


class Observer(Connection):
    """Looks over one connection as often as it is asked; a pooler may sit in between."""

    def __init__(self, dsn: str, command: str, patience: float = PATIENCE) -> None:
        """Prepare; the connection is opened by the first look.

        Raises:
            ConfigError: the DSN does not read.
        """
        super().__init__(refusals.LOOK, dsn, "the locks", f"batchguard {command}", patience)

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

    def prepared(self) -> Conversation[None]:
        """Connect where needed, and begin a transaction in which names mean what they should."""
        yield from self.connected()
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


def look_once(dsn: str, command: str, keys: Sequence[LockKey]) -> Seen:
    """Look once at these keys.

    Raises:
        BatchguardError: the server cannot be reached, or does not serve.
    """
    with contextlib.closing(Observer(dsn, command)) as observer:
        return observer.look(keys)
