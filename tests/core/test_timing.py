"""The timing chain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchguard.core.errors import ConfigError
from batchguard.core.timing import Timing, verify_timing


def test_defaults() -> None:
    """The built-in numbers are safe: 20 + 20 + 10 + 5 = 55 below 60."""
    assert Timing().window == 55
    assert Timing().lock_deadline(100.0) == 140.0
    verify_timing(Timing())


def test_refused_with_the_sum() -> None:
    """An unsafe chain is refused, with the sum that shows it."""
    with pytest.raises(ConfigError) as caught:
        verify_timing(Timing(ttl=30))
    assert str(caught.value) == (
        "unsafe timing: check-timeout 20 (twice) + kill-after 10 + 5 = 55s must be below ttl 30s: "
        "raise --ttl or lower another. Not started, exit 78."
    )


def test_long_interval_counts_instead_of_the_first_timeout() -> None:
    """With checks further apart than their timeout, the interval is what passes first."""
    with pytest.raises(ConfigError, match=r"check-interval 30 \+ check-timeout 20 \+ kill-after 10 \+ 5 = 65s"):
        verify_timing(Timing(check_interval=30))


def test_equal_is_not_below() -> None:
    """W = S is refused: both would happen at once."""
    with pytest.raises(ConfigError):
        verify_timing(Timing(ttl=55))


def test_kill_after_zero() -> None:
    """0 means never in timeout(1), so it is refused with what to write instead."""
    with pytest.raises(ConfigError, match="--signal KILL"):
        verify_timing(Timing(kill_after=0))


def test_ttl_has_an_upper_bound() -> None:
    """A month is no ttl, and would not fit the kernel's milliseconds."""
    with pytest.raises(ConfigError, match="longer than 7d"):
        verify_timing(Timing(ttl=30 * 86400))


positive = st.floats(min_value=0.01, max_value=1000)


@given(positive, positive, positive, positive)
def test_what_is_accepted_is_safe(interval: float, timeout: float, grace: float, ttl: float) -> None:
    """Whatever passes has the whole chain below the ttl."""
    timing = Timing(interval, timeout, grace, ttl)
    try:
        verify_timing(timing)
    except ConfigError:
        return
    assert max(interval, timeout) + timeout + grace + 5 < ttl
