"""What a lock session says to the server, and how its answers read.

Only texts and values: who sends them is the runtime's business.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from math import ceil
from typing import Any

from batchguard.core.holder import Holder
from batchguard.core.keys import LockKey, key_in_pg_locks
from batchguard.core.settle import ServerAge
from batchguard.core.timing import LONGEST_TTL, Timing

WAIT_SLICE = 2.0
"""Seconds that one statement queues for a lock: a wait keeps a snapshot, and an endless one would hold up a
CREATE INDEX CONCURRENTLY of the holder for ever."""

LONGEST_PROBE = 32767
"""Seconds: the kernel's limit for TCP_KEEPIDLE and TCP_KEEPINTVL (tcp(7))."""

Row = Sequence[str | None]


@dataclass(frozen=True)
class Identity:
    """What the server says of itself and of our session; `lacks` names a lock function that may not be called."""

    backend_pid: int
    database: str
    database_oid: int
    system_id: str
    session_start: str
    role: str
    quoted_role: str
    in_recovery: bool
    lacks: str | None
    name_hash: int | None
    server_ttl: float | None


def keepalive_settings(ttl: float) -> tuple[int, int, int, int]:
    """Give tcp_keepalives_idle, _interval and _count (seconds, count) and tcp_user_timeout (milliseconds) for a ttl.

    Where the platform has TCP_USER_TIMEOUT it decides, at the first probe after it (tcp(7)); elsewhere the
    probes do, and their sum is at least the ttl as well.
    """
    idle = min(max(1, round(ttl / 2)), LONGEST_PROBE)
    interval = min(max(1, round(ttl / 12)), LONGEST_PROBE)
    count = max(1, ceil((ttl - idle) / interval))
    return idle, interval, count, ceil(ttl * 1000)


def lock_functions(keys: Sequence[LockKey], shared: bool, waits: bool) -> list[str]:
    """List the signatures of the functions that a run calls, as GRANT and has_function_privilege read them."""
    mode = "_shared" if shared else ""
    kinds = {"int, int" if key.kind == "pair" else "bigint" for key in keys}
    names = [f"pg_try_advisory_lock{mode}", f"pg_advisory_unlock{mode}"] + [f"pg_advisory_lock{mode}"] * waits
    return [f"{name}({kind})" for kind in sorted(kinds) for name in names]


def lock_call(query: str, key: LockKey, shared: bool, first_parameter: int = 1) -> str:
    """Put the calls for a key's number space and mode into a statement."""
    mode = "_shared" if shared else ""
    n = first_parameter
    arguments = f"(${n}::int, ${n + 1}::int)" if key.kind == "pair" else f"(${n}::bigint)"
    for placeholder, function in (
        ("{try_lock}", f"pg_try_advisory_lock{mode}"),
        ("{lock}", f"pg_advisory_lock{mode}"),
        ("{unlock}", f"pg_advisory_unlock{mode}"),
    ):
        query = query.replace(placeholder, function + arguments)
    return query


def key_columns(keys: Sequence[LockKey]) -> list[list[int]]:
    """Give classid, objid and objsubid of several keys as three lists, for unnest."""
    return [list(column) for column in zip(*(key.in_pg_locks for key in keys), strict=True)]


def lock_mode(shared: bool) -> str:
    """Give the mode that `pg_locks` shows."""
    return "ShareLock" if shared else "ExclusiveLock"


def comment(facts: Mapping[str, Any]) -> str:
    """Write what a session tells about itself as an SQL comment; pg_stat_activity shows it in any language.

    Every star is escaped, since `*/` would end the comment and `/*` open another inside it.
    """
    text = json.dumps(facts, ensure_ascii=False, separators=(",", ":")).replace("*", "\\u002a")
    return f"/* batchguard {text} */ "


def timing_facts(timing: Timing) -> dict[str, float]:
    """Give what others reckon with: when a tree is surely dead, and when a session is missed."""
    return {"window_s": timing.window, "check_s": timing.check_interval, "ttl_s": timing.ttl}


def read_comment(query: str | None) -> Mapping[str, Any]:
    """Read what `comment` wrote; nothing where it is cut off, hidden or somebody else's."""
    if not query or not query.startswith("/* batchguard {"):
        return {}
    try:
        facts, _ = json.JSONDecoder().raw_decode(query, query.index("{"))
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def read_identity(row: Row) -> Identity:
    """Read the answer to `identify`."""
    pid, database, oid, system_id, start, role, quoted_role, in_recovery, lacks, name_hash, user_timeout = row
    return Identity(
        backend_pid=int(pid or 0),
        database=database or "",
        database_oid=int(oid or 0),
        system_id=system_id or "",
        session_start=start or "",
        role=role or "",
        quoted_role=quoted_role or "",
        in_recovery=in_recovery == "t",
        lacks=lacks,
        name_hash=None if name_hash is None else int(name_hash),
        server_ttl=seconds_of(user_timeout),
    )


def seconds_of(text: str | None) -> float | None:
    """Read tcp_user_timeout as SHOW writes it (`60s`, `1500ms`, `2min`); None where it does not count (`0`)."""
    units = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
    number = (text or "0").rstrip("abcdefghijklmnopqrstuvwxyz")
    return float(number) * units[(text or "0")[len(number) :] or "ms"] or None


def read_server_age(row: Row) -> ServerAge:
    """Read the answer to `server_age`."""
    started, born, recovered, promoted, writable = (None if value is None else float(value) for value in row)
    return ServerAge(started, born, recovered, promoted, writable)


_KINDS = {"run": "run", "shield": "run", "hold": "hold", "jobs": "jobs"}
_OTHERS_MAY_NOT_SEE = ("since", "host", "run_id", "reason", "until", "window_s")
"""What pg_stat_activity keeps from a role that is neither the session's nor has pg_monitor."""


def application_name(command: str, key: str, who: str) -> str:
    """Give the name of a session: ASCII of at most 63 bytes, of which a long list of keys must not cut off who it is.

    Where `who` is empty, the host follows the key with an @, as in `batchguard run 100:1 daily_sales@bat01`.
    """
    prefix, who = (text.encode("ascii", "replace").decode() for text in (f"batchguard {command} ", who))
    room = max(8, 63 - len(prefix) - len(who))
    text = key.encode("ascii", "replace").decode()
    return f"{prefix}{text if len(text) <= room else text[: room - 2] + '..'}{who}"[:63]


def _moment(text: object) -> datetime | None:
    """Read a moment; None for what is none, since a comment may be anybody's."""
    try:
        return datetime.fromisoformat(str(text)).astimezone() if text else None
    except (ValueError, OverflowError, OSError):
        return None


def _clock(moment: datetime | None) -> str | None:
    """Write when something ends, with the date unless it is today's, and seconds only where there are some."""
    if moment is None:
        return None
    day = "" if moment.date() == datetime.now().astimezone().date() else "%Y-%m-%d "
    return moment.strftime(f"{day}%H:%M{':%S' if moment.second else ''} %Z")


def printable(value: object) -> str | None:
    """Give a text of somebody else's as one harmless line; None for what is no text."""
    if not isinstance(value, str):
        return None
    return "".join(sign if sign.isprintable() else "?" for sign in value)[:300]


def _seconds(value: object) -> float | None:
    """Read a number of seconds; None for what is none, or could not be one of ours."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= LONGEST_TTL else None


def read_holder(row: Row) -> Holder:
    """Read one line of `locks`."""
    classid, objid, objsubid, mode, granted, *of_session = row
    return Holder(
        key=key_in_pg_locks(int(classid or 0), int(objid or 0), int(objsubid or 0)),
        shared=mode == "ShareLock",
        waits=granted != "t",
        **_read_session(*of_session),
    )


@lru_cache(maxsize=16)  # a session may hold thousands of locks
def _read_session(
    pid: str | None,
    user: str | None,
    application: str | None,
    query: str | None,
    since: str | None,
    age: str | None,
    host: str | None,
    hidden: str | None,
    silent: str | None,
    start: str | None,
) -> dict[str, Any]:
    facts = read_comment(query)
    application = printable(application)
    words = (application or "").split(" ")
    by = _KINDS.get(words[1], "other") if words[0] == "batchguard" and len(words) > 1 else "other"
    begun, held_s = _moment(since), float(age) if age is not None else None
    if by != "other":  # what the server knows of it is the end of its last statement, or the begin of a slice
        begun = _moment(facts.get("since"))
        held_s = max(0.0, (datetime.now().astimezone() - begun).total_seconds()) if begun else None
    until = _moment(facts.get("until"))
    return {
        "pid": None if pid is None else int(pid),
        "user": printable(user),
        "application": application,
        "by": by,
        "host": printable(facts.get("host")) or host,
        "since": begun.isoformat() if begun else None,
        "since_clock": begun.strftime("%H:%M:%S") if begun else None,
        "held_s": held_s,
        "run_id": printable(facts.get("run_id")),
        "reason": printable(facts.get("reason")),
        "until": until.isoformat() if until else None,
        "until_clock": _clock(until),
        "window_s": _seconds(facts.get("window_s")),
        "check_s": _seconds(facts.get("check_s")),
        "ttl_s": _seconds(facts.get("ttl_s")),
        "silent_s": float(silent) if silent is not None else None,
        "session_start": start,
        "hidden": tuple(name for name in _OTHERS_MAY_NOT_SEE if name != "since" or not begun) if hidden == "t" else (),
    }
