"""Who holds an advisory lock, or waits for one, as far as our role may see; and how people are told."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchguard.core.durations import format_duration
from batchguard.core.keys import LockKey

NEEDS_MONITOR = "hidden: needs pg_monitor"

ABANDONED_AFTER = 2.5
"""A session that misses its check by this many intervals, and a second, is one whose client may be gone."""


@dataclass(frozen=True)
class Holder:
    """A session that holds a lock or waits for it; durations in seconds, moments as RFC 3339 texts.

    `pid` is None for a prepared transaction, which belongs to no session. `hidden` names the fields that our role may
    not see. `silent_s` is the time since the session's last statement, `check_s` and `ttl_s` what it says of itself.
    """

    pid: int | None
    key: LockKey | None = None
    shared: bool = False
    waits: bool = False
    user: str | None = None
    application: str | None = None
    by: str = "other"
    host: str | None = None
    since: str | None = None
    since_clock: str | None = None
    held_s: float | None = None
    run_id: str | None = None
    reason: str | None = None
    until: str | None = None
    until_clock: str | None = None
    window_s: float | None = None
    check_s: float | None = None
    ttl_s: float | None = None
    silent_s: float | None = None
    session_start: str | None = None
    hidden: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name that a batchguard session gives itself: `daily_sales@bat02`."""
        return (self.application or "").rpartition(" ")[2] or self.backend

    @property
    def backend(self) -> str:
        """The session as people find it on the server."""
        return "a prepared transaction" if self.pid is None else f"backend {self.pid}"

    @property
    def who(self) -> str:
        """The session in a few words: `run daily_sales@bat02`, `"psql"`."""
        if self.by != "other":
            return f"{self.by} {self.title}"
        if self.pid is None:
            return "a prepared transaction"
        return f'"{self.application}"' if self.application else "a session without a name"


def on_hold(holder: Holder) -> str:
    """Say who paused a batch, until when and why."""
    until = f" until {holder.until_clock}" if holder.until_clock else ""
    reason = f': "{holder.reason}"' if holder.reason else ""
    return f"on hold by {holder.title}{until}{reason}"


def describe(holder: Holder) -> str:
    """Say in one line all there is to say of a session."""
    parts = [on_hold(holder) if holder.by == "hold" and not holder.waits else holder.who]
    if holder.since_clock:
        # PostgreSQL does not tell when a lock was taken, only when the session's last statement was.
        guess = " or before" if holder.by == "other" and not holder.waits else ""
        age = f" ({format_duration(holder.held_s)})" if holder.held_s is not None else ""
        parts.append(f"since {holder.since_clock}{guess}{age}")
    if holder.pid is None:
        parts.append("see pg_prepared_xacts")
    else:
        parts.append(holder.backend)
    parts += [f"{what} {value}" for what, value in (("user", holder.user), ("host", holder.host)) if value]
    text = ", ".join(parts)
    if holder.hidden:
        text += f"; {', '.join(holder.hidden)} {NEEDS_MONITOR}"
    return text + _vanished(holder)


def _vanished(holder: Holder) -> str:
    """Say when the server will free the lock by itself, where the client gives no sign of life."""
    if holder.check_s is None or holder.ttl_s is None or holder.silent_s is None or holder.waits:
        return ""
    if holder.silent_s < ABANDONED_AFTER * holder.check_s + 1:
        return ""
    silence = format_duration(holder.silent_s)
    left = holder.ttl_s - holder.silent_s
    if left > -holder.ttl_s / 4:  # the server notices at its next probe, up to ttl/12 later, and at a retransmission
        within = "at any moment" if left <= 0 else f"within {format_duration(left)}"
        return f"; no check from it for {silence}: if its host is gone, the server frees the lock {within}"
    return f"; no check from it for {silence}, though its host answers the server: is the process stopped?"


def holder_json(holder: Holder, database: str | None, server: str | None, name: str | None) -> Mapping[str, Any]:
    """Give a holder as JSON names it, in `status` and in the log and status files."""
    return {
        "database": database,
        "server": server,
        "key": str(holder.key) if holder.key else None,
        "kind": holder.key.kind if holder.key else None,
        "name": name,
        "mode": "shared" if holder.shared else "exclusive",
        "state": "waiting" if holder.waits else "held",
        "by": holder.by,
        "pid": holder.pid,
        "user": holder.user,
        "application": holder.application,
        "host": holder.host,
        "since": holder.since,
        "run_id": holder.run_id,
        "reason": holder.reason,
        "until": holder.until,
        "window_s": holder.window_s,
        "hidden": list(holder.hidden),
    }
