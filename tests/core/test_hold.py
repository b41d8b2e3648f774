"""What a hold decides."""

from datetime import datetime, timedelta

import pytest

from batchguard.core.errors import UsageError
from batchguard.core.hold import Incarnation, Loss, is_released, parse_end, read_reason

NOW = datetime(2026, 11, 30, 22, 30).astimezone()


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("23:00", datetime(2026, 11, 30, 23, 0)),
        ("06:00", datetime(2026, 12, 1, 6, 0)),
        ("22:30", datetime(2026, 12, 1, 22, 30)),
        ("22:30:01", datetime(2026, 11, 30, 22, 30, 1)),
        ("2026-12-03 06:00", datetime(2026, 12, 3, 6, 0)),
        ("2026-12-03T06:00:00", datetime(2026, 12, 3, 6, 0)),
    ],
)
def test_end_is_the_next_such_moment(text: str, end: datetime) -> None:
    """A time of day is the next one, a date and time that one, both local."""
    assert parse_end(text, NOW) == end.astimezone()


def test_end_with_an_offset() -> None:
    """A moment of another zone is that moment."""
    assert parse_end("2026-12-03T06:00:00+09:00", NOW).utcoffset() == NOW.utcoffset()


@pytest.mark.parametrize("text", ["25:00", "6", "tomorrow", "", "2026-11-30 22:29", "2026-02-30 01:00", "0001-01-01"])
def test_no_end(text: str) -> None:
    """What is no time, or over, is refused."""
    with pytest.raises(UsageError):
        parse_end(text, NOW)


BEFORE = Incarnation("start", "reset", "00000001", "7")


@pytest.mark.parametrize(
    ("sqlstate", "after", "released"),
    [
        ("57P01", BEFORE, True),
        ("57P01", Incarnation("later", "reset", "00000001", "7"), False),
        ("57P02", Incarnation("start", "later", "00000001", "7"), False),
        ("57P01", Incarnation("start", "reset", "00000002", "7"), False),
        (None, BEFORE, False),
    ],
)
def test_released_or_lost(sqlstate: str | None, after: Incarnation, released: bool) -> None:
    """The server's word that the session ends, and a server that is what it was: somebody did it."""
    assert is_released(Loss("it ended", NOW + timedelta(seconds=1), sqlstate), BEFORE, after) == released


@pytest.mark.parametrize("text", ["", " ", "a\nb", "\x1b[2J", "x" * 101])
def test_no_reason(text: str) -> None:
    """A reason is one line that can be shown whole."""
    with pytest.raises(UsageError):
        read_reason(text)


def test_reason() -> None:
    """In any language."""
    assert read_reason("DB移行") == "DB移行"
