"""Durations as people write and read them."""

import math
import re

from batchguard.core.errors import UsageError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([smhd]?)", re.ASCII)

FOREVER = math.inf


def parse_duration(text: str) -> float:
    """Read seconds from `90`, `1.5m`, `2h` or `1d`.

    Raises:
        UsageError: the text is none of these, or longer than a hundred years.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise UsageError(f'"{text}" is not a duration; write seconds, or a number with s, m, h or d (90, 1.5m, 2h)')
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > 100 * 366 * 86400:
        raise UsageError(f'"{text}" is longer than a hundred years; leave the option out for "without limit"')
    return seconds


def format_duration(seconds: float) -> str:
    """Write seconds in at most two units: `0.4s`, `55s`, `3m10s`, `2h13m`, `1d4h`."""
    if seconds < 60 and round(seconds, 1) < 60:
        return f"{round(seconds, 1):g}s"
    whole = round(seconds)
    for size, unit, rest_size, rest_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // rest_size
            return f"{whole // size}{unit}" + (f"{rest}{rest_unit}" if rest else "")
    return f"{whole}s"
