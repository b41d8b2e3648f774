"""The timing chain: how long everything may take so that a tree is dead before its lock is free.

All values are seconds; moments are CLOCK_BOOTTIME, which goes on while the machine sleeps.
"""

from dataclasses import dataclass

from batchguard.core.durations import format_duration
from batchguard.core.errors import ConfigError

KILL_TAKES_EFFECT = 5.0
"""Time for SIGKILL to empty a process tree: 2 s were seen for 400 processes that kept forking."""


LONGEST_TTL = 7 * 86400.0
"""Beyond this, numbers of milliseconds no longer fit where the kernel and libpq keep them."""


@dataclass(frozen=True)
class Timing:
    """The four numbers a user can set, and what follows from them."""

    check_interval: float = 5.0
    check_timeout: float = 20.0
    kill_after: float = 10.0
    ttl: float = 60.0

    @property
    def longest_silence(self) -> float:
        """Time from sending a good check to the end of the next one's patience.

        The next check leaves when the last was answered, or after an interval, whichever is later,
        and then has its whole timeout.
        """
        return max(self.check_interval, self.check_timeout) + self.check_timeout

    @property
    def window(self) -> float:
        """W: the latest that a tree is dead after its last good check was sent."""
        return self.longest_silence + self.kill_after + KILL_TAKES_EFFECT

    @property
    def chain(self) -> str:
        """The window as the sum that it is, for people."""
        silence = f"check-timeout {self.check_timeout:g} (twice)"
        if self.check_timeout < self.check_interval:
            silence = f"check-interval {self.check_interval:g} + check-timeout {self.check_timeout:g}"
        return f"{silence} + kill-after {self.kill_after:g} + {KILL_TAKES_EFFECT:g} = {self.window:g}s"

    def lock_deadline(self, checked_at: float) -> float:
        """Give the moment at which a lock last checked at `checked_at` no longer counts as held."""
        return checked_at + self.longest_silence


def is_safe(timing: Timing) -> bool:
    """Tell whether `verify_timing` accepts these numbers."""
    try:
        verify_timing(timing)
    except ConfigError:
        return False
    return True


def verify_timing(timing: Timing) -> None:
    """Refuse numbers with which the server could free a lock while its tree still lives.

    Raises:
        ConfigError: the window is not shorter than the time to live; the sum is in the message.
    """
    if timing.kill_after <= 0:
        raise ConfigError(
            "kill-after 0 would mean no time at all between the signal and the kill, where timeout(1) means never: "
            "to kill at once, write --signal KILL. Not started, exit 78."
        )
    if min(timing.check_interval, timing.check_timeout, timing.ttl) <= 0:
        raise ConfigError("check-interval, check-timeout and ttl must be above 0. Not started, exit 78.")
    if timing.ttl > LONGEST_TTL:
        raise ConfigError(
            f"ttl {format_duration(timing.ttl)} is longer than {format_duration(LONGEST_TTL)}: a host that dies would "
            "keep its lock that long. Not started, exit 78."
        )
    if timing.window < timing.ttl:
        return
    raise ConfigError(
        f"unsafe timing: {timing.chain} must be below ttl {format_duration(timing.ttl)}: raise --ttl or lower another. "
        "Not started, exit 78."
    )
