"""Conversations with a server that ends the session."""

import pytest

from batchguard.adapters.clock import now
from batchguard.adapters.postgres import (
    Session,
    SessionEndedError,
    connect,
    drive,
    execute,
    finish_statement,
    resolve_parameters,
    watch,
)
from batchguard.runtime.connection import sleep
from tests.fixtures.server import Server
from tests.fixtures.waiting import until


@pytest.fixture
def session(server: Server) -> Session:
    """Open a session."""
    return drive(connect({**resolve_parameters(server.dsn), "application_name": "batchguard test"}, 5), sleep)


def terminate(server: Server, session: Session) -> None:
    """End the session on the server, and wait until it is gone; we have read nothing of that."""
    server.sql("SELECT pg_terminate_backend(%s)", session.pgconn.backend_pid)
    until(lambda: not server.sessions())


def test_reason_of_an_end_before_a_statement(server: Server, session: Session) -> None:
    """The statement finds the session ended already: the server's reason is known, not only the broken connection."""
    terminate(server, session)
    with pytest.raises(SessionEndedError) as caught:
        drive(execute(session, "SELECT 1", until=now() + 5), sleep)
    assert caught.value.sqlstate == "57P01"
    session.close()


def test_reason_of_an_end_within_a_statement(server: Server, session: Session) -> None:
    """The same for a statement under way whose conversation was ended."""
    conversation = execute(session, "SELECT pg_sleep(60)")
    next(conversation)
    conversation.close()
    until(
        lambda: (
            server.sql("SELECT state FROM pg_stat_activity WHERE pid = %s", session.pgconn.backend_pid) == [("active",)]
        )
    )
    terminate(server, session)
    with pytest.raises(SessionEndedError) as caught:
        drive(finish_statement(session, now() + 5), sleep)
    assert caught.value.sqlstate == "57P01"
    session.close()


def test_reason_of_an_end_while_idle(server: Server, session: Session) -> None:
    """The same for a session that is only watched."""
    terminate(server, session)
    with pytest.raises(SessionEndedError) as caught:
        drive(watch(session, now() + 5), sleep)
    assert caught.value.sqlstate == "57P01"
    session.close()


def test_watch_ends_in_time(session: Session) -> None:
    """A session that lives is watched as long as was asked."""
    began = now()
    drive(watch(session, began + 0.2), sleep)
    assert now() >= began + 0.2
    session.close()
