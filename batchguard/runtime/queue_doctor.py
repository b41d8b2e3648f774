"""The part of `batchguard doctor` that looks at the queue, where there is one."""

import contextlib
from collections.abc import Sequence

from batchguard.adapters.job_store import SCHEMA_VERSION, read_version
from batchguard.adapters.postgres import Conversation, StatementError
from batchguard.core.diagnosis import Diagnosis
from batchguard.core.errors import BatchguardError
from batchguard.core.job_settings import JobSettings
from batchguard.core.queue_diagnosis import STUCK_LEASE, QueueFacts, diagnose_queue
from batchguard.runtime.queue import Queue


def examine_queue(dsn: str, settings: JobSettings, *, is_expected: bool) -> Sequence[Diagnosis]:
    """Judge the queue; where there is none, that is a finding only if one is expected."""
    place = f'queue in schema "{settings.schema}"'
    with contextlib.closing(QueueDoctor(dsn, settings, "doctor", check_version=False)) as doctor:
        try:
            facts = doctor.persist(doctor.gather)
        except BatchguardError as error:
            return [Diagnosis("queue", "error", place, str(error), "correct it")]
    if facts is not None:
        return list(diagnose_queue(facts))
    missing = Diagnosis(
        "queue", "warning", place, "is not there, though [jobs] speaks of it", "batchguard jobs migrate"
    )
    return [missing] if is_expected else []


class QueueDoctor(Queue):
    """Asks what there is to know of one queue."""

    def gather(self) -> Conversation[QueueFacts | None]:
        """Ask for all of it; None where there is no queue."""
        rows = yield from self.run("look_for_schema", [self.quoted_schema])
        if rows[0] != ("t", "t", "t"):
            return None
        rows = yield from self.run("version")
        version = read_version(rows)
        rows = yield from self.run("diagnose", [f"{self.quoted_schema}.jobs"])
        has_autovacuum, dead_rows, invalid, age, who, end = rows[0]
        return QueueFacts(
            place=f'queue in schema "{self.jobs.schema}"',
            version=version,
            wanted_version=SCHEMA_VERSION,
            has_autovacuum=has_autovacuum == "t",
            dead_rows=int(dead_rows or 0),
            invalid_indexes=invalid,
            snapshot_age=None if age is None else float(age),
            snapshot_of=who,
            snapshot_end=end,
            stuck=(yield from self.count_stuck()),
        )

    def count_stuck(self) -> Conversation[int | None]:
        """Count the leases that were forgotten; None where the role may not look."""
        try:
            rows = yield from self.run("stuck_leases", [STUCK_LEASE])
        except StatementError as error:
            if error.sqlstate == "42501":
                return None
            raise
        return int(rows[0][0] or 0)
