"""What a hold decides: when it ends, and whether it was lost or taken away."""

from dataclasses import dataclass
from datetime import datetime, time, timedelta

from batchguard.core.errors import UsageError
from batchguard.core.holder import Holder
from batchguard.core.keys import Key
from batchguard.core.settings import RunSettings

ENDED_BY_SOMEBODY = "57P01"
"""admin_shutdown: pg_terminate_backend, or a fast shutdown."""

LONGEST_REASON = 100
"""Characters: a session tells of itself in the first 1024 bytes of its statement (track_activity_query_size)."""


@dataclass(frozen=True)
class HoldRequest:
    """One call of `hold`; durations in seconds, `end_at` a moment of local time, None for no end."""

    settings: RunSettings
    keys: tuple[Key, ...]
    key_text: str
    key_from_name: str | None
    dsn: str
    reason: str | None = None
    for_s: float | None = None
    end_at: datetime | None = None
    wait_s: float = 0.0
    detach: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class Incarnation:
    """What changes when a server restarts, recovers from a crash, or another one becomes the primary."""

    started: str | None
    recovered: str | None
    timeline: str | None
    system_id: str | None


@dataclass(frozen=True)
class Loss:
    """How a hold's session was lost: why, in words; when, by the local clock; and the server's last SQLSTATE."""

    why: str
    lost_at: datetime
    sqlstate: str | None = None


@dataclass(frozen=True)
class Busy:
    """The key was not to be had: who has it, None when it was gone by the time we looked."""

    holder: Holder | None
    waited_s: float


def is_released(loss: Loss, before: Incarnation, after: Incarnation) -> bool:
    """Tell a hold that somebody ended from one that was lost.

    A restart and pg_terminate_backend give the same SQLSTATE; after the latter the server is what it was. A session
    that ends without the server's word was cut off by the network.
    """
    return loss.sqlstate == ENDED_BY_SOMEBODY and before == after


def parse_end(text: str, now: datetime) -> datetime:
    """Read when a hold ends, in local time: `06:00` is the next such moment, `2026-12-01 06:00` that one.

    Raises:
        UsageError: the text is neither, or in the past.
    """
    try:
        clock = time.fromisoformat(text)
    except ValueError:
        clock = None
    if clock is not None and clock.tzinfo is None:
        today = datetime.combine(now.date(), clock).astimezone()
        return today if today > now else datetime.combine(now.date() + timedelta(days=1), clock).astimezone()
    try:
        moment = datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(f'"{text}" is not a time; write 06:00, or 2026-12-01 06:00') from None
    if moment <= now:
        raise UsageError(f"{moment:%Y-%m-%d %H:%M:%S %Z} is over")
    return moment


def read_reason(text: str) -> str:
    """Check the reason of a hold: one line, that others are shown.

    Raises:
        UsageError: it is none, or too long to be shown whole.
    """
    if not text.strip() or not text.isprintable():
        raise UsageError("a reason is one line of text")
    if len(text) > LONGEST_REASON:
        raise UsageError(f"a reason has at most {LONGEST_REASON} characters; this one has {len(text)}")
    return text
