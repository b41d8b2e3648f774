"""What the queue's statements look like in a schema, and how their rows read.

Only texts and values: who sends them is the runtime's business.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from batchguard.core.envelope import NewJob
from batchguard.core.job import ClaimedJob, JobRow, QueueStats

SCHEMA_VERSION = 1
"""Of the newest migration."""

Row = Sequence[str | None]

_MIGRATIONS = Path(__file__).parent / "sql" / "migrations"


def quote_identifier(name: str) -> str:
    """Quote a name as SQL does."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Quote a text as SQL does, whatever standard_conforming_strings says."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def in_schema(sql: str, schema: str) -> str:
    """Put a schema into a statement."""
    return sql.replace("{schema}", quote_identifier(schema))


def statements_in(queries: Mapping[str, str], schema: str) -> dict[str, str]:
    """Put a schema into all statements, and into some the beginning that they share."""
    return {name: in_schema(text.replace("{own}", queries["own"]), schema) for name, text in queries.items()}


def migrations(after: int, schema: str) -> list[tuple[int, str]]:
    """Give the migrations that follow a version, in their order: number and statements."""
    files = sorted(_MIGRATIONS.glob("[0-9]*.sql"))
    found = [(int(file.name.partition("_")[0]), file.read_text(encoding="utf-8")) for file in files]
    return [(number, in_schema(text, schema)) for number, text in found if number > after]


def statements_of(script: str) -> list[str]:
    """Cut a script of ours into its statements: each ends with a semicolon at the end of a line."""
    without_comments = re.sub(r"^ *--.*\n", "", script, flags=re.MULTILINE)
    return [piece.strip() for piece in re.split(r";[ ]*$", without_comments, flags=re.MULTILINE) if piece.strip()]


def read_version(rows: Sequence[Row]) -> int:
    """Read the rows of `version`; without one it is 0."""
    return int(rows[0][0] or 0) if rows else 0


def read_claimed(row: Row, token: str, lease: float, schema: str) -> ClaimedJob:
    """Read a row of `claim` or `claimed`; a payload that did not come is empty."""
    id_, queue, priority, attempts, max_attempts, created_at, claimed_until, dedupe_key, payload = row
    return ClaimedJob(
        id=int(id_ or 0),
        claim_token=token,
        queue=queue or "",
        priority=int(priority or 0),
        attempt=int(attempts or 0),
        max_attempts=int(max_attempts or 0),
        created_at=created_at or "",
        claimed_until=claimed_until or "",
        lease=lease,
        dedupe_key=dedupe_key,
        idempotency_key=f"{schema}.jobs:{id_}:{created_at}",
        payload=payload or "",
    )


def read_job(row: Row) -> JobRow:
    """Read a row of `list` or `show`."""
    id_, queue, status, priority, attempts, max_attempts, created_at, run_at, *rest = row
    claimed_until, claimed_by, finished_at, exit_code, reason, last_error, dedupe_key = rest
    return JobRow(
        id=int(id_ or 0),
        queue=queue or "",
        status=status or "",
        priority=int(priority or 0),
        attempts=int(attempts or 0),
        max_attempts=int(max_attempts or 0),
        created_at=created_at or "",
        run_at=run_at,
        claimed_until=claimed_until,
        claimed_by=claimed_by,
        finished_at=finished_at,
        exit_code=None if exit_code is None else int(exit_code),
        reason=reason,
        last_error=last_error,
        dedupe_key=dedupe_key,
    )


def read_stats(row: Row, done: Mapping[str, int]) -> QueueStats:
    """Read a row of `stats`."""
    queue, *counts, oldest_s = row
    ready, delayed, running, expired, failed = (int(count or 0) for count in counts)
    age = None if oldest_s is None else round(max(0.0, float(oldest_s)), 3)
    return QueueStats(queue or "", ready, delayed, running, expired, failed, done.get(queue or "", 0), age)


def copy_line(job: NewJob) -> bytes:
    """Write a job as a line of COPY's text format: the columns of `copy_jobs` and `copy_incoming`."""
    key = r"\N" if job.dedupe_key is None else _field(job.dedupe_key)
    fields = (_field(job.payload), _field(job.queue), job.priority, job.run_at or r"\N", job.max_attempts, key)
    return "{}\t{}\t{}\t{}\t{}\t{}\n".format(*fields).encode()


_SPECIAL = re.compile(r"[\\\t\n\r]")
_ESCAPED = {"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"}


def _field(text: str) -> str:
    return _SPECIAL.sub(lambda found: _ESCAPED[found[0]], text) if _SPECIAL.search(text) else text
