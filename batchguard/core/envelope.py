"""Jobs on their way in: what a command line or a line of JSON says of one, besides its payload."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from batchguard.core.errors import UsageError
from batchguard.core.job_settings import read_dedupe_key, read_max_attempts, read_priority, read_queue
from batchguard.core.payload import explain, read_whole, refuse_constant, refuse_depth, verify_payload

_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(?::\d\d(?:\.\d{1,6}\d*)?)?(?:[Zz]|[+-]\d\d(?::?\d\d)?)",
    re.ASCII,
)
_BEGIN = re.compile(r"[ \t\n\r]*\{[ \t\n\r]*(?:(\})[ \t\n\r]*)?")
_NAME = re.compile(r'"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_NEXT = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")
_DECODER = json.JSONDecoder(parse_int=read_whole, parse_float=str, parse_constant=refuse_constant)


@dataclass(frozen=True)
class NewJob:
    """One job to be enqueued; `payload` is JSON as it was written, `run_at` RFC 3339 with an offset."""

    payload: str
    queue: str
    priority: int = 0
    run_at: str | None = None
    max_attempts: int = 5
    dedupe_key: str | None = None


def read_run_at(value: Any) -> str:
    """Read a time that means one moment: with an offset, since PostgreSQL would add the session's own.

    Raises:
        UsageError: it is no RFC 3339 time, or no such time exists.
    """
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        raise UsageError(
            f"{_shown(value)} is not a time with an offset; write 2026-12-24T06:00:00+09:00, or …Z for UTC"
        )
    try:
        moment = datetime.fromisoformat(value.upper())
        moment.utctimetuple()  # outside of the years 1 to 9999 there is none
        if abs(moment.utcoffset() or timedelta()) >= timedelta(hours=16):  # more than PostgreSQL takes
            raise ValueError(moment)
    except (ValueError, OverflowError):
        raise UsageError(f"{_shown(value)} is not in the calendar, or not at this offset") from None
    return moment.isoformat()


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "queue": read_queue,
    "priority": read_priority,
    "run_at": read_run_at,
    "max_attempts": read_max_attempts,
    "dedupe_key": read_dedupe_key,
}
FIELDS = ("payload", *_READERS)


def read_envelope(text: str, defaults: NewJob, max_payload: int) -> NewJob:
    """Read one line of `--jsonl`: an object with `payload`, and with what differs from the defaults.

    The payload stays as it is written: its numbers never go through Python's.

    Raises:
        UsageError: what is wrong with it.
    """
    members = _split_object(text)
    if "payload" not in members:
        raise UsageError("payload is missing; bare payloads are --lines")
    payload, _ = members.pop("payload")
    verify_payload(payload, max_payload, is_parsed=True)
    given: dict[str, Any] = {"payload": payload}
    for name, (_, value) in members.items():
        if name not in _READERS:
            raise UsageError(f"{_shown(name)} is not one of {', '.join(FIELDS)}")
        if value is not None:
            try:
                given[name] = _READERS[name](value)
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from None
    return replace(defaults, **given)


def _split_object(text: str) -> dict[str, tuple[str, Any]]:
    """Give the members of a JSON object: each as it is written, and read.

    Raises:
        UsageError: it is no object, or has a member twice.
    """
    members: dict[str, tuple[str, Any]] = {}
    found = _BEGIN.match(text)
    if found is None:
        raise UsageError('not an object: each line is an envelope such as {"payload": …}; bare payloads are --lines')
    place = found.end()
    is_last = found[1] is not None
    while not is_last:
        name, place = _read_name(text, place)
        if name in members:
            raise UsageError(f"{_shown(name)} stands there twice")
        value, end = _raw_decode(text, place)
        members[name] = text[place:end], value
        found = _NEXT.match(text, end)
        if found is None:
            raise UsageError(f"not JSON: expecting ',' or '}}' at character {end + 1}")
        place = found.end()
        is_last = found[1] == "}"
    if place != len(text):
        raise UsageError(f"not JSON: extra data at character {place + 1}")
    return members


def _read_name(text: str, place: int) -> tuple[str, int]:
    """Read a name, and give the place of its value."""
    found = _NAME.match(text, place)
    if found is not None:
        return found[1], found.end()
    name, end = _raw_decode(text, place)
    colon = _COLON.match(text, end)
    if not isinstance(name, str) or colon is None:
        raise UsageError(f"not JSON: expecting a name in quotes and ':' at character {place + 1}")
    return name, colon.end()


def _raw_decode(text: str, place: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {explain(error)}") from None
    except RecursionError:
        refuse_depth()


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
