"""Looking at locks without taking any."""

import select
from collections.abc import Sequence

from batchguard.adapters import lock_session
from batchguard.adapters.clock import now
from batchguard.adapters.postgres import (
    ConnectFailedError,
    Conversation,
    SessionEndedError,
    StatementError,
    TimedOutError,
    Wait,
    connect,
    drive,
    execute,
    host_text,
    load_queries,
    resolve_parameters,
)
from batchguard.core.errors import UnreachableError
from batchguard.core.keys import Key, keys_of
from batchguard.core.messages import Holder

_PATIENCE = 10.0


def current_holders(dsn: str, keys: Sequence[Key]) -> dict[str, Holder]:
    """Ask who holds each of these keys now, by the key's text.

    Raises:
        UnreachableError: the database does not answer.
    """
    params = {**resolve_parameters(dsn), "application_name": "batchguard keys"}
    try:
        found = drive(_holders(params, keys), _sleep)
    except ConnectFailedError as error:
        why = "; ".join(attempt.why for attempt in error.attempts)
    except SessionEndedError:
        why = "the server ended the session"
    except TimedOutError:
        why = f"no answer within {_PATIENCE:g}s"
    except StatementError as error:
        why = f"{error.sqlstate}, {error.message}"
    else:
        return found
    raise UnreachableError(f"cannot reach {host_text(params)} ({why}); exit 69.")


def _holders(params: dict[str, str], keys: Sequence[Key]) -> Conversation[dict[str, Holder]]:
    session = yield from connect(params, _PATIENCE)
    queries = load_queries("lock")
    until = now() + _PATIENCE
    sql = "SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"
    oid = yield from execute(session, sql, until=until)
    found = {}
    for key in keys:
        for lock in keys_of(key):
            columns = lock_session.key_columns([lock])
            rows = yield from execute(session, queries["holders"], [oid[0][0], *columns], until)
            if rows:
                found[str(lock)] = lock_session.read_holder(rows[0])
    session.close()
    return found


def _sleep(wait: Wait) -> int:
    """Sleep for a conversation, with nothing else to watch."""
    poll = select.poll()
    if wait.fd >= 0:
        poll.register(wait.fd, wait.events)
    ready = dict(poll.poll(min(1.0, max(0.0, wait.until - now())) * 1000 + 1))
    return ready.get(wait.fd, 0)
