"""Jobs: what a claim gives out, how an attempt ended, and how both are written as JSON."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from batchguard.core.durations import parse_duration
from batchguard.core.errors import UsageError
from batchguard.core.payload import explain, read_whole

Status = Literal["pending", "running", "done", "failed"]
STATUSES: tuple[Status, ...] = ("running", "failed", "pending", "done")
"""In the order in which they matter to who looks."""

Verb = Literal["complete", "fail", "release", "extend"]
LARGEST_ID = 2**63 - 1
LONGEST_ERROR = 4096
"""Bytes of `last_error` that are kept: the end, where the reason stands."""


_PAYLOAD = ', "payload": '


def line_with_payload(facts: Mapping[str, Any], payload: str) -> str:
    """Write a line of JSON whose last member is a payload as the server printed it."""
    return json.dumps(facts, ensure_ascii=False)[:-1] + _PAYLOAD + payload + "}"


@dataclass(frozen=True)
class ClaimedJob:
    """A job that is ours until `claimed_until`; `payload` is JSON as the server printed it."""

    id: int
    claim_token: str
    queue: str
    priority: int
    attempt: int
    max_attempts: int
    created_at: str
    claimed_until: str
    lease: float
    dedupe_key: str | None
    idempotency_key: str
    payload: str

    @property
    def place(self) -> tuple[int, str, int]:
        """Where it stands among others of its queue."""
        return (self.priority, self.created_at, self.id)

    def to_line(self) -> str:
        """Write it as one line of JSON, with the payload to the digit."""
        facts = {
            "id": self.id,
            "claim_token": self.claim_token,
            "queue": self.queue,
            "priority": self.priority,
            "attempt": self.attempt,
            "max_attempts": self.max_attempts,
            "created_at": self.created_at,
            "claimed_until": self.claimed_until,
            "lease_s": self.lease,
            "dedupe_key": self.dedupe_key,
            "idempotency_key": self.idempotency_key,
        }
        return line_with_payload(facts, self.payload)


@dataclass(frozen=True)
class JobRow:
    """What list and show tell of a job; times are RFC 3339."""

    id: int
    queue: str
    status: str
    priority: int
    attempts: int
    max_attempts: int
    created_at: str
    run_at: str | None
    claimed_until: str | None
    claimed_by: str | None
    finished_at: str | None
    exit_code: int | None
    reason: str | None
    last_error: str | None
    dedupe_key: str | None


@dataclass(frozen=True)
class QueueStats:
    """What there is in one queue; the done ones are an estimate where there are many."""

    queue: str
    ready: int = 0
    delayed: int = 0
    running: int = 0
    expired: int = 0
    failed: int = 0
    done_estimate: int = 0
    oldest_ready_s: float | None = None


@dataclass(frozen=True)
class Ending:
    """How an attempt ended, besides the job: the same for all jobs of one statement.

    `retry_in` replaces the doubled pause (seconds); `lease` is that of an extension (seconds).
    """

    is_final: bool = False
    retry_in: float | None = None
    exit_code: int | None = None
    reason: str | None = None
    error: str | None = None
    lease: float | None = None


@dataclass(frozen=True)
class Claim:
    """A job and the token that proves whose it is."""

    id: int
    token: str
    ending: Ending = Ending()


@dataclass(frozen=True)
class Result:
    """What became of one job: done, retrying, failed, released, extended, already, lost."""

    id: int
    result: str

    def to_line(self) -> str:
        """Write it as one line of JSON."""
        return json.dumps({"id": self.id, "result": self.result}, ensure_ascii=False)


_SETTLED: Mapping[Verb, tuple[str, ...]] = {
    "complete": ("done",),
    "fail": ("pending", "failed"),
    "release": ("pending",),
    "extend": (),
}
"""What a job is after each, so that who repeats it after a lost answer is told "already"."""

_WORDS: Mapping[tuple[Verb, str], str] = {
    ("complete", "done"): "done",
    ("fail", "pending"): "retrying",
    ("fail", "failed"): "failed",
    ("release", "pending"): "released",
    ("extend", "running"): "extended",
}


def results_of(verb: Verb, ids: Iterable[int], changed: Mapping[int, str], recalled: Mapping[int, str]) -> list[Result]:
    """Say what became of each job.

    Args:
        verb: what was asked for.
        ids: of whom.
        changed: the new status of those that were changed.
        recalled: the status of the others whose token is still ours.
    """
    return [
        Result(id_, _WORDS[verb, changed[id_]])
        if id_ in changed
        else Result(id_, "already" if recalled.get(id_) in _SETTLED[verb] else "lost")
        for id_ in ids
    ]


def clean_error(text: str) -> str | None:
    """Make an error text fit to be kept and shown: its end, control characters escaped."""
    data = visible(text).encode("utf-8", "backslashreplace").strip()
    return data[-LONGEST_ERROR:].decode("utf-8", "ignore") or None


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Escape control characters but for lines and tabs: a terminal would obey them."""
    return _CONTROL.sub(lambda sign: f"\\x{ord(sign[0]):02x}", text)


def read_id(value: Any) -> int:
    """Read a job's id, as a number or as text.

    Raises:
        UsageError: it is none.
    """
    text = str(value).lstrip("0") if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= LARGEST_ID):
        raise UsageError("id is missing" if value is None else f"{_cut(value)} is not the id of a job")
    return int(text)


def read_token(value: Any) -> str:
    """Read a claim token.

    Raises:
        UsageError: it is no text that a claim could have given out.
    """
    if not isinstance(value, str) or not value.isprintable() or not 1 <= len(value) <= 200:
        raise UsageError(
            "claim_token is missing" if value is None else "claim_token is not the text that claim gave out"
        )
    return value


def read_claim(line: str, verb: Verb, default: Ending = Ending()) -> Claim:
    """Read one line of `--stdin`: what claim printed will do, and how the attempt ended may be added.

    Args:
        line: a JSON object.
        verb: what it is for; what only another one reads is not looked at.
        default: how the attempt ended where the line does not say.

    Raises:
        UsageError: what is wrong with it.
    """
    if not line.strip():
        raise UsageError("it is empty; each line is for one job")
    try:
        facts = json.loads(line, parse_float=str, parse_int=read_whole)
    except RecursionError:
        # A plain INSERT can put in what is deeper than Python reads. In our own lines the payload comes last.
        head, found, _ = line.partition(_PAYLOAD)
        return read_claim(head + "}" if found else "{", verb, default)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {explain(error)}") from None
    if not isinstance(facts, dict):
        raise UsageError('not an object such as {"id": 17, "claim_token": "…"}')
    id_, token = read_id(facts.get("id")), read_token(facts.get("claim_token"))
    if verb == "extend":
        return Claim(id_, token, Ending(lease=_optional(facts, "lease", read_lease, default.lease)))
    if verb != "fail":
        return Claim(id_, token)
    return Claim(
        id_,
        token,
        Ending(
            is_final=not _optional(facts, "retry", _read_flag, not default.is_final),
            retry_in=_optional(facts, "retry_in", _read_seconds, default.retry_in),
            exit_code=_optional(facts, "exit_code", read_exit_code, default.exit_code),
            error=_optional(facts, "error", _read_error, default.error),
        ),
    )


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _optional(facts: Mapping[str, Any], name: str, read: Callable[[Any], Any], default: Any) -> Any:
    value = facts.get(name)
    try:
        return default if value is None else read(value)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{value!r} is neither true nor false")
    return value


def _read_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UsageError(f"{value!r} is not a duration")
    return parse_duration(str(value))


def read_lease(value: Any) -> float:
    """Read how long a claim is good for (seconds).

    Raises:
        UsageError: it is no duration, or none at all.
    """
    seconds = _read_seconds(value)
    if seconds <= 0:
        raise UsageError("a lease of 0 would be over at once")
    return seconds


def _read_error(value: Any) -> str | None:
    if not isinstance(value, str):
        raise UsageError("the error must be text")
    return clean_error(value)


def read_exit_code(value: Any) -> int:
    """Read what a command ended with.

    Raises:
        UsageError: no command ends with it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise UsageError(f"{value!r} is not an exit code from 0 to 255")
    return value


def group_claims(claims: Sequence[Claim]) -> list[tuple[str, Ending, list[int]]]:
    """Put together what one statement can do: the same token, the same ending; ids in order, each once."""
    groups: dict[tuple[str, Ending], set[int]] = {}
    for claim in claims:
        groups.setdefault((claim.token, claim.ending), set()).add(claim.id)
    return [(token, ending, sorted(ids)) for (token, ending), ids in groups.items()]
