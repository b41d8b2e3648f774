"""The clocks: one that goes on while the machine sleeps, and the one that people read."""

import time
from datetime import datetime


def now() -> float:
    """Give the seconds since boot, time asleep included (CLOCK_BOOTTIME); never set, never set back."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wall_time() -> datetime:
    """Give the local time with its offset, for people and for log files."""
    return datetime.now().astimezone()
