"""`batchguard still-held`: does the run that this batch is in still hold its lock?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import psycopg
from psycopg.conninfo import conninfo_to_dict

from batchguard.adapters import lock_session
from batchguard.adapters.clock import now
from batchguard.adapters.postgres import (
    Conversation,
    FailedAttempt,
    SessionEndedError,
    drive,
    resolve_parameters,
    session_parameters,
)
from batchguard.core import messages
from batchguard.core.errors import BatchguardError, RightsError, TableError, UnreachableError, UsageError
from batchguard.core.keys import LockKey, parse_numbers
from batchguard.core.messages import Subject
from batchguard.runtime.access import LOOK, database_text, pause
from batchguard.runtime.connection import sleep
from batchguard.runtime.inspect import Observer

_NEEDED = ("KEY", "LOCK_PID", "LOCK_SINCE", "DATABASE", "SYSTEM_ID", "LOCK_DSN")
_WHERE = ("host", "hostaddr", "port", "dbname", "user")


@dataclass(frozen=True)
class OwnLock:
    """The locks of the run that this process was started in, as its environment tells."""

    keys: tuple[LockKey, ...]
    pid: int
    since: str
    system_id: str
    dsn: str


def read_environment(environ: Mapping[str, str]) -> OwnLock:
    """Read what a run has told its command.

    Raises:
        UsageError: this is not a run's command, or what it was told did not get here whole.
    """
    found = {name: environ.get(f"BATCHGUARD_{name}", "") for name in _NEEDED}
    missing = [f"BATCHGUARD_{name}" for name, value in found.items() if not value]
    if missing:
        raise UsageError(messages.outside_a_run(missing))
    try:
        keys = tuple(_read_key(text) for text in found["KEY"].split())
        pid = int(found["LOCK_PID"])
        conninfo_to_dict(found["LOCK_DSN"])
    except (ValueError, TableError, psycopg.Error) as error:
        raise UsageError(messages.strange_environment(str(error).strip())) from None
    if not keys:  # none of no locks is lost, which must not be taken for a yes
        raise UsageError(messages.strange_environment("BATCHGUARD_KEY names no key"))
    return OwnLock(keys, pid, found["LOCK_SINCE"], found["SYSTEM_ID"], found["LOCK_DSN"])


def _read_key(text: str) -> LockKey:
    key = parse_numbers(text)
    if not isinstance(key, LockKey):
        raise ValueError(f'"{text}" is no key')
    return key


def still_held(own: OwnLock, dsn: str, patience: float) -> str | None:
    """Give None when the locks are still held, else a line that says why they are not.

    Args:
        own: what the run has told its command.
        dsn: where the database is named for everybody; it may know the password that the environment does not have.
        patience: seconds after which the question has no answer.

    Raises:
        BatchguardError: it cannot be told; not to be taken for a yes.
    """
    question = _Question(own, dsn, patience)
    try:
        why = question.answer()
        return None if why is None else messages.no_longer_held(question.subject, why)
    finally:
        question.close()


class _Question(Observer):
    def __init__(self, own: OwnLock, dsn: str, patience: float) -> None:
        super().__init__(dsn, "still-held", patience)
        self.own = own
        self.until = now() + patience
        self.is_standby = False
        where = {name: str(value) for name, value in conninfo_to_dict(own.dsn).items() if value is not None}
        base = {name: value for name, value in resolve_parameters(dsn).items() if name not in _WHERE}
        self.params = session_parameters({**base, **where}, "batchguard still-held", self.settings.ttl)
        text = " ".join(map(str, own.keys))
        self.subject = Subject(text, database_text(where.get("dbname", ""), where), "")

    @property
    def patience(self) -> float:
        """What is left of the time for the whole question."""
        return max(0.1, self.until - now())

    def answer(self) -> str | None:
        while True:
            try:
                return drive(self.explained(self.ask_server()), sleep)
            except SessionEndedError as error:
                self.close()
                if now() >= self.until:
                    why = f"the server ended the session, {error.reason}"
                    raise UnreachableError(messages.cannot_tell(self.subject, why, 69)) from None
                drive(pause(0.2), sleep)
            except BatchguardError as error:
                if self.is_standby:
                    return "the server is a standby now"
                raise type(error)(messages.cannot_tell(self.subject, str(error), error.exit_code)) from None

    def refuse_connection(self, attempts: Sequence[FailedAttempt]) -> NoReturn:
        """A standby where the lock was taken: it was demoted, and holds no locks."""
        self.is_standby = all(attempt.standby for attempt in attempts)
        super().refuse_connection(attempts)

    def ask_server(self) -> Conversation[str | None]:
        self.session = yield from self.connect(self.until)
        self.is_connected = True
        database = self.session.pgconn.db.decode("utf-8", "replace")
        self.subject = Subject(self.subject.key, database_text(database, self.session.params), self.session.host)
        params = [self.own.pid, self.own.since, *lock_session.key_columns(self.own.keys)]
        yield from self.prepared()
        rows = yield from self.ask(LOOK["still_held"], params)
        yield from self.ask(LOOK["end_look"])
        in_recovery, system_id, session_lives, is_same, held = rows[0]
        if system_id != self.own.system_id:
            raise UnreachableError(f"{self.session.host} is another server than the one that the lock was taken on")
        if in_recovery == "t":
            return "the server is a standby now"
        if session_lives == "f":
            return f"its session, backend {self.own.pid}, has ended"
        if is_same is None:
            raise RightsError(messages.cannot_see_session(self.own.pid))
        if is_same == "f":
            return f"its session has ended; backend {self.own.pid} is another one now"
        return None if int(held or 0) == len(self.own.keys) else "its session lives, but the lock is gone"
