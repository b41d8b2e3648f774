"""Durations as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchguard.core.durations import format_duration, parse_duration
from batchguard.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0", 0), ("1.5m", 90), ("2h", 7200), ("1d", 86400), (".5", 0.5), ("5.", 5), (" 3s ", 3)],
)
def test_parse(text: str, seconds: float) -> None:
    """Seconds, or a number with a unit; fractions allowed."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "1w", "1h30m", "forever", "1e3", "nan", "inf", "٣", "9" * 30])
def test_refuse(text: str) -> None:
    """Anything else is refused, and the message shows what was written."""
    with pytest.raises(UsageError, match="is"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.42, "0.4s"),
        (55, "55s"),
        (59.96, "1m"),
        (60, "1m"),
        (190, "3m10s"),
        (7980, "2h13m"),
        (32400, "9h"),
        (100800, "1d4h"),
        (86400 * 30, "30d"),
    ],
)
def test_format(seconds: float, text: str) -> None:
    """At most two units, none of them zero."""
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e9))
def test_format_has_at_most_two_units(seconds: float) -> None:
    """No duration is written in more than two units."""
    assert 1 <= sum(letter.isalpha() for letter in format_duration(seconds)) <= 2
