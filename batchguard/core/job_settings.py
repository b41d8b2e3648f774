"""The settings of the queue: what `[jobs]` of the config file may say, and what is built in."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from batchguard.core.errors import UsageError
from batchguard.core.settings import read_duration, read_positive_duration

LONGEST_QUEUE = 63
LONGEST_DEDUPE_KEY = 512
"""Bytes: both are columns of indexes."""

MOST_ATTEMPTS = 2**31 - 1
LARGEST_PAYLOAD = 200 * 1024 * 1024
"""Bytes: PostgreSQL's own limits for one string in jsonb (2^28) and one field of a row (1 GB) stay out of sight."""

LONGEST_SCHEMA = 63
_SIZES = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "KB": 1000, "MB": 1000**2, "GB": 1000**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?I?B|)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class JobSettings:
    """Every setting of the queue; durations in seconds, `max_payload` in bytes."""

    schema: str = "batchguard"
    queue: str = "default"
    lease: float = 60.0
    max_attempts: int = 5
    backoff: float = 10.0
    backoff_max: float = 3600.0
    kill_after: float = 25.0
    max_runtime: float = inf
    max_payload: int = 1024**2


def read_schema(value: Any) -> str:
    """Read the name of a schema; any name does that PostgreSQL takes.

    Raises:
        UsageError: it is no name, or one of PostgreSQL's own.
    """
    if not _is_text(value, LONGEST_SCHEMA):
        raise UsageError(f"{value!r} is not the name of a schema: 1 to {LONGEST_SCHEMA} bytes")
    if value.startswith("pg_") or value == "information_schema":
        raise UsageError(f'schema "{value}" is PostgreSQL\'s own; name another')
    return str(value)


def read_queue(value: Any) -> str:
    """Read the name of a queue.

    Raises:
        UsageError: it is no text, empty, too long, or has control characters.
    """
    if not _is_text(value, LONGEST_QUEUE) or any(ord(sign) < 0x20 or ord(sign) == 0x7F for sign in value):
        raise UsageError(f"{_cut(value)} is not the name of a queue: 1 to {LONGEST_QUEUE} bytes, no control characters")
    return str(value)


def read_dedupe_key(value: Any) -> str:
    """Read a dedupe key.

    Raises:
        UsageError: it is no text, empty, too long, or has a NUL in it.
    """
    if not _is_text(value, LONGEST_DEDUPE_KEY):
        raise UsageError(f"{_cut(value)} is not a dedupe key: text of 1 to {LONGEST_DEDUPE_KEY} bytes")
    return str(value)


def read_priority(value: Any) -> int:
    """Read a priority; lower comes first, as with nice(1).

    Raises:
        UsageError: it is no whole number of a smallint's range.
    """
    if not _is_whole(value) or not -32768 <= value <= 32767:
        raise UsageError(f"{_cut(value)} is not a priority: a whole number from -32768 to 32767, lower first")
    return int(value)


def read_max_attempts(value: Any) -> int:
    """Read how often a job is tried; the first time counts.

    Raises:
        UsageError: it is no whole number from 1 on.
    """
    if not _is_whole(value) or not 1 <= value <= MOST_ATTEMPTS:
        raise UsageError(f"{_cut(value)} is not a number of attempts: a whole number from 1 on, the first run counts")
    return int(value)


def read_size(value: Any) -> int:
    """Read bytes from `65536`, `"512KiB"` or `"1MiB"`.

    Raises:
        UsageError: it is none of these, 0, or more than a payload can be.
    """
    found = _SIZE.fullmatch(str(value).strip()) if isinstance(value, int | str) and value is not True else None
    size = int(float(found[1]) * _SIZES[found[2].upper()]) if found else 0
    if not 1 <= size <= LARGEST_PAYLOAD:
        raise UsageError(f"{value!r} is not a size from 1 to {LARGEST_PAYLOAD // 1024**2}MiB; write bytes, KiB or MiB")
    return size


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any, longest: int) -> bool:
    """Tell what PostgreSQL takes as text of 1 to `longest` bytes: no NUL, and no byte that was no character."""
    try:
        return isinstance(value, str) and "\0" not in value and 1 <= len(value.encode()) <= longest
    except UnicodeEncodeError:
        return False


def _cut(value: Any) -> str:
    """Write a value that a file has, which may be of any length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


_READERS = {
    "schema": read_schema,
    "queue": read_queue,
    "lease": read_positive_duration,
    "max_attempts": read_max_attempts,
    "backoff": read_duration,
    "backoff_max": read_duration,
    "kill_after": read_duration,
    "max_runtime": read_positive_duration,
    "max_payload": read_size,
}
JOBS_NAMES = frozenset(_READERS)


def read_job_setting(name: str, value: Any) -> Any:
    """Turn one value of `[jobs]` into what JobSettings holds.

    Raises:
        UsageError: the value is not of the setting's kind.
    """
    return _READERS[name](value)


def build_job_settings(given: Mapping[str, Any], table: Mapping[str, Any]) -> JobSettings:
    """Merge what the command line gave over what `[jobs]` says; all of it read already."""
    return JobSettings(**{**table, **given})
