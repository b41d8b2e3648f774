"""What `doctor` makes of the queue: what slows it down or stops it, each finding one line, with what to do."""

from collections.abc import Iterator
from dataclasses import dataclass

from batchguard.core.diagnosis import Diagnosis
from batchguard.core.durations import format_duration

OLD_SNAPSHOT = 600.0
"""Seconds from which on a snapshot is pointed out: no row that ended since can be removed, and claims pass over it."""

STUCK_LEASE = 600.0
"""Seconds after its lease from which on a job is pointed out: any claim or reap would have taken it back."""

MANY_DEAD = 100_000
"""Dead rows that autovacuum should have removed long before: its threshold for the table is 5000."""


@dataclass(frozen=True)
class QueueFacts:
    """What the server told about one queue; durations in seconds, None where there is nothing to tell."""

    place: str
    version: int
    wanted_version: int
    has_autovacuum: bool = True
    dead_rows: int = 0
    invalid_indexes: str | None = None
    snapshot_age: float | None = None
    snapshot_of: str | None = None
    snapshot_end: str | None = None
    """The statement that would end what keeps the snapshot."""
    stuck: int | None = 0
    """Jobs whose lease has been over for long; None where the role may not look."""


def diagnose_queue(facts: QueueFacts) -> Iterator[Diagnosis]:
    """Judge a queue that is there."""
    yield _version(facts)
    if not facts.has_autovacuum:
        yield Diagnosis(
            "queue_autovacuum",
            "warning",
            facts.place,
            "is not vacuumed: autovacuum is off, and claims become slower with each job that ends",
            "turn autovacuum on, for the server and for this table (autovacuum_enabled)",
        )
    if facts.dead_rows > MANY_DEAD:
        yield Diagnosis(
            "queue_dead_rows",
            "warning",
            facts.place,
            f"has {facts.dead_rows} dead rows, which claims may have to pass over",
            "see whether a snapshot keeps them (the lines below), and whether autovacuum keeps up; then VACUUM it",
            str(facts.dead_rows),
        )
    if facts.invalid_indexes:
        yield Diagnosis(
            "queue_index",
            "error",
            facts.place,
            f"has an index that is not valid: {facts.invalid_indexes}",
            "REINDEX INDEX CONCURRENTLY it",
            facts.invalid_indexes,
        )
    if facts.snapshot_age is not None and facts.snapshot_age > OLD_SNAPSHOT:
        yield Diagnosis(
            "queue_snapshot",
            "warning",
            facts.snapshot_of or "?",
            f"keeps a snapshot for {format_duration(facts.snapshot_age)} already: nothing that ended since can be "
            "removed from the queue, and claims become slower",
            f"let it end, or end it: {facts.snapshot_end}",
            f"{facts.snapshot_age:.0f}",
        )
    yield _leases(facts)


def _version(facts: QueueFacts) -> Diagnosis:
    if facts.version == facts.wanted_version:
        return Diagnosis("queue", "ok", facts.place, f"has version {facts.version}", value=str(facts.version))
    newer = facts.version > facts.wanted_version
    return Diagnosis(
        "queue",
        "error",
        facts.place,
        f"has version {facts.version}, and this batchguard needs {facts.wanted_version}",
        "install the batchguard that made it" if newer else "batchguard jobs migrate",
        str(facts.version),
    )


def _leases(facts: QueueFacts) -> Diagnosis:
    if facts.stuck is None:
        return Diagnosis(
            "queue_leases", "note", facts.place, "may not be read by this role", "ask its owner for SELECT on the table"
        )
    if facts.stuck:
        return Diagnosis(
            "queue_leases",
            "warning",
            facts.place,
            f"has {facts.stuck} jobs whose lease has been over for more than {format_duration(STUCK_LEASE)}: no worker "
            "has asked for jobs since",
            "is there a worker at all? batchguard jobs reap takes them back",
            str(facts.stuck),
        )
    return Diagnosis("queue_leases", "ok", facts.place, "has no job whose lease was forgotten")
