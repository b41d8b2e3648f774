"""`batchguard jobs enqueue`: jobs come in whole, or not at all; what is wrong is found before anything is sent."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import IO, BinaryIO, Literal, Self, TypeVar

from batchguard.adapters.job_store import copy_line
from batchguard.adapters.postgres import (
    Conversation,
    SessionEndedError,
    StatementError,
    TimedOutError,
    copy_in,
    execute,
)
from batchguard.core import refusals
from batchguard.core.envelope import NewJob, read_envelope
from batchguard.core.errors import BatchguardError, ConfigError, SystemLimitError, UnreachableError, UsageError
from batchguard.core.job_settings import JobSettings
from batchguard.core.payload import decode_utf8, string_payload, verify_payload, verify_utf8
from batchguard.runtime.queue import TRIES, Queue, again

T = TypeVar("T")

Form = Literal["jsonl", "lines", "text", "null"]

_IN_MEMORY = 32 * 1024**2
"""Bytes of a batch of jobs that are kept in memory; more of them go to a temporary file."""
_PIECE = 256 * 1024


@dataclass(frozen=True)
class Enqueued:
    """How many jobs came in, and how many did not because their dedupe key is in use."""

    count: int = 0
    duplicates: int = 0


class UnsureError(UnreachableError):
    """The session ended when the jobs were to be committed."""


def read_value(stream: BinaryIO, defaults: NewJob, max_payload: int) -> NewJob:
    """Read a stream that is one JSON value.

    Raises:
        UsageError: it is none.
    """
    longest = _longest(max_payload)
    data = stream.read(longest + 1)
    if not data.strip():
        raise UsageError("stdin is empty")
    if len(data) > longest:
        raise UsageError(f"stdin has more than {longest} bytes, which no payload has")
    _refuse_bom(data)
    return read_payload(decode_utf8(data), defaults, max_payload)


def read_argument(text: str, defaults: NewJob, max_payload: int) -> NewJob:
    """Read a payload of the command line.

    Raises:
        UsageError: it is no JSON, or none that can be kept.
    """
    verify_utf8(text)
    try:
        return read_payload(text, defaults, max_payload)
    except UsageError as error:
        shown = text if len(text) <= 40 else text[:39] + "…"
        raise UsageError(
            f"PAYLOAD {shown}: {error}. A payload is JSON: quote it for the shell, and a text once more: '\"hello\"'. "
            "A file of many is --jsonl < FILE, or --lines, --text, --null"
        ) from None


def read_payload(text: str, defaults: NewJob, max_payload: int) -> NewJob:
    """Read a payload.

    Raises:
        UsageError: it is no JSON, or none that can be kept.
    """
    verify_payload(text, max_payload)
    return replace(defaults, payload=text)


def _longest(max_payload: int) -> int:
    """Give how many bytes one job can take at most: each letter may be written as six, and there may be blanks."""
    return 6 * max_payload + 65536


def read_jobs(stream: BinaryIO, form: Form, defaults: NewJob, max_payload: int) -> Iterator[NewJob]:
    """Read a stream of jobs, one a line; with "null", one up to each NUL.

    Raises:
        UsageError: what is wrong, and on which line.
    """
    longest = _longest(max_payload)
    for number, item in enumerate(_split(stream, b"\0" if form == "null" else b"\n", longest), 1):
        try:
            if len(item) > longest:
                raise UsageError(f"it has more than {longest} bytes, which no job has")
            yield _read_job(item, form, defaults, max_payload, is_first=number == 1)
        except UsageError as error:
            raise UsageError(f"{unit(form)} {number}: {error}") from None


def unit(form: Form) -> str:
    """Say what holds one job."""
    return "item" if form == "null" else "line"


def _read_job(item: bytes, form: Form, defaults: NewJob, max_payload: int, *, is_first: bool) -> NewJob:
    if is_first:
        _refuse_bom(item)
    is_text = form in ("text", "null")
    if not (item if is_text else item.strip()):
        raise UsageError("it is empty; each holds one job")
    text = decode_utf8(item)
    match form:
        case "jsonl":
            return read_envelope(text, defaults, max_payload)
        case "lines":
            return read_payload(text, defaults, max_payload)
        case _:
            return replace(defaults, payload=string_payload(text, max_payload))


def _refuse_bom(data: bytes) -> None:
    if data.startswith(b"\xef\xbb\xbf"):
        raise UsageError("it begins with a byte order mark; save the file as UTF-8 without one")


def _split(stream: BinaryIO, sign: bytes, longest: int) -> Iterator[bytes]:
    """Cut a stream into its items; one that is longer than the longest is not read to its end."""
    if sign == b"\n":
        while line := stream.readline(longest + 2):
            yield line.removesuffix(b"\n")
        return
    rest = b""
    while data := stream.read(_PIECE):
        *items, rest = (rest + data).split(sign)
        yield from items
        if len(rest) > longest:
            break
    if rest:
        yield rest


@dataclass(frozen=True)
class EnqueuedOne:
    """The id of a new job, or of the one that has its dedupe key; None where the role may not read it."""

    id: int | None
    is_duplicate: bool = False


def enqueue_one(dsn: str, settings: JobSettings, job: NewJob) -> EnqueuedOne:
    """Put in one job.

    Raises:
        BatchguardError: a line for the user.
    """
    with contextlib.closing(_Entrance(dsn, settings)) as entrance:
        return entrance.drive(entrance.put_one(job))


def enqueue_all(dsn: str, settings: JobSettings, jobs: Iterable[NewJob], *, fail_on_duplicate: bool) -> Enqueued:
    """Put in all jobs, or none.

    Args:
        dsn: the database's conninfo or URI.
        settings: of the queue.
        jobs: read to the end before anything is sent.
        fail_on_duplicate: put in none if the dedupe key of one is in use.

    Raises:
        BatchguardError: a line for the user.
    """
    try:
        with _Batch() as batch:
            for job in jobs:
                batch.add(job)
            with contextlib.closing(_Entrance(dsn, settings)) as entrance:
                return entrance.drive(entrance.put_all(batch, fail_on_duplicate=fail_on_duplicate))
    except UnsureError:
        raise
    except BatchguardError as error:
        raise type(error)(f"{str(error).rstrip('.')}; nothing is enqueued") from None


class Chunks:
    """Puts in so many jobs at a time; what went in stays when a later one is wrong."""

    def __init__(self, dsn: str, settings: JobSettings, size: int, *, fail_on_duplicate: bool) -> None:
        """Prepare; `total` is what came in, `dealt_with` how many items of the source are done with."""
        self.entrance = _Entrance(dsn, settings)
        self.size = size
        self.fail_on_duplicate = fail_on_duplicate
        self.total = Enqueued()
        self.dealt_with = 0

    def put(self, jobs: Iterable[NewJob]) -> None:
        """Put in all of them, up to the first error, or the first duplicate where that is one.

        Raises:
            BatchguardError: a line for the user, which does not say where to resume.
        """
        source = iter(jobs)
        with contextlib.closing(self.entrance) as entrance:
            while True:
                with _Batch() as batch:
                    for job in islice(source, self.size):
                        batch.add(job)
                    if not batch.count:
                        return
                    put_all = entrance.put_all(batch, fail_on_duplicate=self.fail_on_duplicate)
                    done = entrance.drive(put_all)
                self.total = Enqueued(self.total.count + done.count, self.total.duplicates + done.duplicates)
                if self.fail_on_duplicate and done.duplicates:
                    return
                self.dealt_with += batch.count


def moment_from_now(dsn: str, settings: JobSettings, seconds: float) -> str:
    """Ask the server's clock what time it will be (RFC 3339).

    Raises:
        BatchguardError: a line for the user.
    """
    with contextlib.closing(_Entrance(dsn, settings)) as entrance:
        return entrance.drive(entrance.from_now(seconds))


class _DuplicatesError(BatchguardError):
    """So many dedupe keys are in use, where that is to undo everything."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class _Batch:
    """Jobs of one transaction, written down as COPY reads them."""

    def __init__(self) -> None:
        self.lines: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 -- closed by __exit__
        self.has_keys = False
        self.count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()

    def add(self, job: NewJob) -> None:
        self.has_keys = self.has_keys or job.dedupe_key is not None
        try:
            self.lines.write(copy_line(job))
        except OSError as error:
            raise SystemLimitError(f"no room for a temporary file ({error.strerror}); set TMPDIR. Exit 69") from None
        self.count += 1

    def pieces(self) -> Iterator[bytes]:
        """Give what COPY reads."""
        self.lines.seek(0)
        while piece := self.lines.read(_PIECE):
            yield piece


class _Entrance(Queue):
    def __init__(self, dsn: str, settings: JobSettings) -> None:
        super().__init__(dsn, settings, "enqueue")

    def explain(self, error: StatementError) -> BatchguardError:
        """Data that this server does not take (its encoding, its limits) is a matter of who sends it."""
        if error.sqlstate.startswith(("22", "23", "54", "0A")):
            return UsageError(refusals.not_taken(error.sqlstate, error.message))
        return super().explain(error)

    def explain_end(self, error: SessionEndedError) -> BatchguardError:
        """Nothing is repeated blindly: before the commit, nothing has come in."""
        return UnreachableError(refusals.enqueue_ended(self.subject.database, error.reason))

    def commit(self) -> Conversation[None]:
        return self.surely(super().commit())

    def surely(self, conversation: Conversation[T]) -> Conversation[T]:
        """Carry on the part that commits: when its answer is lost, nobody knows."""
        try:
            return (yield from conversation)
        except SessionEndedError as error:
            raise UnsureError(refusals.enqueue_unsure(self.subject.database, error.reason)) from None
        except TimedOutError:
            raise UnsureError(refusals.enqueue_unsure(self.subject.database, "no answer")) from None

    def put_one(self, job: NewJob) -> Conversation[EnqueuedOne]:
        params = [job.payload, job.queue, job.priority, job.run_at, job.max_attempts, job.dedupe_key]
        yield from self.prepared()
        for _ in range(TRIES):
            try:
                rows = yield from self.surely(self.run("enqueue_one", params))
            except StatementError as error:
                if error.sqlstate != "42501":
                    raise
                rows = yield from self.surely(self.run("enqueue_blindly", params))
                return EnqueuedOne(None, is_duplicate=rows[0][0] == "0")
            if rows:
                return EnqueuedOne(int(rows[0][0] or 0))
            if job.dedupe_key is None:
                break
            try:
                found = yield from self.run("find_duplicate", [job.queue, job.dedupe_key])
            except StatementError as error:
                if error.sqlstate != "42501":
                    raise
                return EnqueuedOne(None, is_duplicate=True)
            if found:  # else it ended just now, and its key is free again
                return EnqueuedOne(int(found[0][0] or 0), is_duplicate=True)
        raise ConfigError(refusals.not_inserted(self.subject.database))

    def put_all(self, batch: _Batch, *, fail_on_duplicate: bool) -> Conversation[Enqueued]:
        def fill() -> Conversation[Enqueued]:
            enqueued = yield from self.fill(batch)
            if fail_on_duplicate and enqueued.duplicates:
                raise _DuplicatesError(enqueued.duplicates)
            return enqueued

        yield from self.prepared()
        try:
            return (yield from again(lambda: self.in_transaction(fill, statement_timeout=0)))
        except _DuplicatesError as error:
            return Enqueued(0, error.count)

    def fill(self, batch: _Batch) -> Conversation[Enqueued]:
        if not batch.has_keys:
            yield from copy_in(self.session, self.statements["copy_jobs"], batch.pieces(), self.patience)
            return Enqueued(batch.count)
        yield from self.ask(self.statements["create_incoming"])
        yield from copy_in(self.session, self.statements["copy_incoming"], batch.pieces(), self.patience)
        rows = yield from execute(self.session, self.statements["enqueue_incoming"])
        count = int(rows[0][0] or 0)
        return Enqueued(count, batch.count - count)

    def from_now(self, seconds: float) -> Conversation[str]:
        rows = yield from self.run("from_now", [seconds])
        return rows[0][0] or ""
