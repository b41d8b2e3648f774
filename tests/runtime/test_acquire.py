"""Who is ahead in the queue for a lock: who gave it back is forgotten, who vanished is not."""

import contextlib
from collections.abc import Iterator

import psycopg
import pytest

from batchguard.adapters.postgres import drive
from batchguard.core.keys import pair
from batchguard.core.settings import RunRequest, RunSettings
from batchguard.runtime.acquire import RELEASED, Acquisition
from batchguard.runtime.connection import sleep
from tests.fixtures.server import Server

Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def waiting(server: Server) -> Iterator[Acquisition]:
    """Give a run that wants 100:1 and has not asked for it yet."""
    request = RunRequest(RunSettings(wait=60.0), ("true",), (pair(100, 1),), key_text="100:1", dsn=server.dsn)
    acquisition = Acquisition(request, {"host": "test"}, want_holder=False, outer={})
    drive(acquisition.open(0.0), sleep)
    yield acquisition
    acquisition.session.close()


@contextlib.contextmanager
def holder(server: Server) -> Iterator[Connection]:
    """Hold 100:1 as another run does."""
    with server.connect(application_name="batchguard run 100:1@other") as connection:
        connection.execute("SELECT pg_advisory_lock(100, 1)")
        yield connection


def ahead(waiting: Acquisition) -> set[int]:
    """Look once more, and give whose lock would count as abandoned if it were ours now."""
    drive(waiting.note_rivals(), sleep)
    waiting.hear()
    return waiting.ahead - waiting.released


def test_who_vanishes_between_two_looks_is_remembered(waiting: Acquisition, server: Server) -> None:
    """Ended after one look and before the next: its tree may live, though nobody has the lock any more."""
    with holder(server) as other:
        drive(waiting.note_holders(), sleep)
        pid = other.info.backend_pid
        assert waiting.ahead == {pid}
        server.sql("SELECT pg_terminate_backend(%s, 5000)", pid)
    assert ahead(waiting) == {pid}


def test_who_gave_the_lock_back_is_forgotten(waiting: Acquisition, server: Server) -> None:
    """Said so before the lock was free, between two looks, while it was seen to have it still: not abandoned."""
    with holder(server) as other:
        drive(waiting.note_holders(), sleep)
        other.execute("SELECT pg_notify('batchguard', %s)", [RELEASED])
        assert ahead(waiting) == set()
        other.execute("SELECT pg_advisory_unlock(100, 1)")
        assert ahead(waiting) == set()
        assert waiting.ahead == set()


def test_who_takes_the_lock_again_is_ahead_again(waiting: Acquisition, server: Server) -> None:
    """What a session said of an earlier time does not count for what it holds now."""
    with holder(server) as other:
        drive(waiting.note_holders(), sleep)
        other.execute("SELECT pg_notify('batchguard', %s)", [RELEASED])
        other.execute("SELECT pg_advisory_unlock(100, 1)")
        assert ahead(waiting) == set()
        other.execute("SELECT pg_advisory_lock(100, 1)")
        other.execute("SELECT pg_notify('batchguard', '100:1')")
        assert ahead(waiting) == {other.info.backend_pid}
