"""A connection that is opened when it is first needed, and again after a failure: for commands that ask and leave."""

import select
from typing import TypeVar

from batchguard.adapters.clock import now
from batchguard.adapters.postgres import Conversation, SessionEndedError, Wait, drive
from batchguard.core.errors import BatchguardError
from batchguard.core.messages import Subject
from batchguard.core.refusals import Purpose
from batchguard.core.settings import RunSettings
from batchguard.runtime.access import Access, database_text

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds for the connection and for each answer: somebody sits there and waits."""


class Connection(Access):
    """Carries on one conversation after another over a session of its own."""

    def __init__(self, purpose: Purpose, dsn: str, about: str, application: str, patience: float = PATIENCE) -> None:
        """Prepare; the connection is opened by the first conversation that needs it.

        Raises:
            ConfigError: the DSN does not read.
        """
        settings = RunSettings(connect_timeout=patience, check_timeout=patience)
        super().__init__(purpose, settings, dsn, (), about, application)
        self.is_connected = False
        self.was_connected = False
        self.retry_until = 0.0
        """Until when (CLOCK_BOOTTIME) a connection that fails is tried again; the first one is not."""

    def connected(self) -> Conversation[bool]:
        """Connect where needed, and tell whether it was."""
        if self.is_connected:
            return False
        self.session = yield from self.connect(self.retry_until)
        database = self.session.pgconn.db.decode("utf-8", "replace")
        self.subject = Subject(self.key_text, database_text(database, self.session.params), self.session.host)
        self.is_connected = self.was_connected = True
        return True

    def drive(self, conversation: Conversation[T]) -> T:
        """Carry on one conversation to its end; after a failure the next one opens a new connection.

        Raises:
            BatchguardError: a line for the user.
        """
        try:
            return drive(self.explained(conversation), sleep)
        except SessionEndedError as error:
            self.close()
            raise self.explain_end(error) from None
        except BatchguardError:
            self.close()
            raise

    def explain_end(self, error: SessionEndedError) -> BatchguardError:
        """Turn the end of the session into what a user must be told."""
        return self.unserved(f"the server ended the session, {error.reason}")

    def close(self) -> None:
        """End the connection, if there is one."""
        if self.is_connected:
            self.is_connected = False
            self.session.close()


def sleep(wait: Wait) -> int:
    """Sleep for a conversation, with nothing else to watch."""
    poll = select.poll()
    if wait.fd >= 0:
        poll.register(wait.fd, wait.events)
    ready = dict(poll.poll(min(1.0, max(0.0, wait.until - now())) * 1000 + 1))
    return ready.get(wait.fd, 0)
