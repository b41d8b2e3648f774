"""The queue as operators see it: list, show, count, wait for, retry, cancel, purge."""

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from batchguard.adapters.clock import now
from batchguard.adapters.job_store import read_job, read_stats
from batchguard.adapters.postgres import Conversation, Row, StatementError
from batchguard.core.errors import UnreachableError
from batchguard.core.job import JobRow, QueueStats, Result
from batchguard.core.job_settings import JobSettings
from batchguard.runtime.queue import CHUNK, Queue

T = TypeVar("T")

PURGE_BATCH = 5000
"""Rows that one transaction deletes: short enough for nobody to notice."""

FEW = 8 * 1024**2
"""Bytes of the index of done jobs (some 250 000) up to which they are counted; beyond, the planner's guess must do."""

_ORDERS = {
    "running": "id",
    "failed": "id DESC",
    "pending": "queue, priority, created_at, id",
    "done": "finished_at DESC, id DESC",
}
_SHORTEST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0


class Upkeep(Queue):
    """One session for one command.

    What counts is `tally`, which also knows what was done before a session ended and another one went on.
    """

    def __init__(self, dsn: str, settings: JobSettings, command: str) -> None:
        """Prepare; the connection is opened by the first statement.

        Raises:
            ConfigError: the DSN does not read.
        """
        super().__init__(dsn, settings, command)
        self.tally: Counter[str] = Counter()
        self.cursor: Counter[str] = Counter()
        """Up to which id each queue has been gone through."""

    def do(self, make: Callable[[], Conversation[T]]) -> T:
        """Carry on one conversation and close the session.

        Raises:
            BatchguardError: a line for the user.
        """
        with contextlib.closing(self):
            return self.persist(make)

    # Looking

    def list_jobs(self, statuses: Sequence[str], queue: str | None, limit: int) -> Conversation[list[JobRow]]:
        """List jobs: state after state in the order that is given, up to `limit`."""
        found: list[JobRow] = []
        for status in statuses:
            if len(found) < limit:
                name = self.ordered("list", _ORDERS[status])
                rows = yield from self.run(name, [status, queue, limit - len(found)])
                found += [read_job(row) for row in rows]
        return found

    def ordered(self, name: str, order: str) -> str:
        """Make a statement with this order, and give its name."""
        self.statements[f"{name} by {order}"] = self.statements[name].replace("{order}", order)
        return f"{name} by {order}"

    def show(self, id_: int) -> Conversation[tuple[JobRow, str | None] | None]:
        """Give one job and its payload, None for a payload that the server cannot print; None without such a job."""
        rows = yield from self.run("show", [id_])
        if not rows:
            return None
        try:
            payloads = yield from self.run("show_payload", [id_])
        except StatementError:
            return read_job(rows[0]), None
        return read_job(rows[0]), payloads[0][0] if payloads else None

    def stats(self, queue: str | None) -> Conversation[list[QueueStats]]:
        """Count what there is in each queue, or in one."""
        rows = yield from self.run("stats")
        done = yield from self.count_done({row[0] or "" for row in rows} | ({queue} if queue else set()))
        found = {row[0] or "": read_stats(row, done) for row in rows}
        for name in done.keys() | ({queue} if queue else set()):
            found.setdefault(name, QueueStats(name, done_estimate=done.get(name, 0)))
        return [found[name] for name in sorted(found) if queue in (None, name)]

    def count_done(self, queues: set[str]) -> Conversation[dict[str, int]]:
        """Count the done jobs where they are few; else guess as the planner does."""
        index = f"{self.quoted_schema}.jobs_done"
        rows = yield from self.run("index_size", [index])
        if int(rows[0][0] or 0) <= FEW:
            rows = yield from self.run("count_done")
            return {queue or "": int(count or 0) for queue, count in rows}
        rows = yield from self.run("known_queues", [self.jobs.schema])
        done = {}
        for name in sorted(queues | {row[0] or "" for row in rows}):
            rows = yield from self.run("estimate_done", [name])
            plan = json.loads("".join(row[0] or "" for row in rows))
            done[name] = int(plan[0]["Plan"]["Plan Rows"])
        return done

    def wait(self, ids: Sequence[int], until: float) -> dict[int, str | None]:
        """Wait until jobs are done or failed.

        Args:
            ids: of which jobs.
            until: when to give up (CLOCK_BOOTTIME).

        Returns:
            what each has become, None where there is no such job, which ends the wait; some may be open still when the
            time is over.

        Raises:
            BatchguardError: a line for the user; a server that is away is waited for as well.
        """
        pause_s = _SHORTEST_PAUSE
        self.give_up_at = until
        with contextlib.closing(self):
            while True:
                try:
                    states = self.persist(lambda: self.states(ids))
                except UnreachableError:
                    if not self.was_connected or now() >= until:
                        raise
                else:
                    is_open = any(state in ("pending", "running") for state in states.values())
                    if not is_open or None in states.values() or now() >= until:
                        return states
                time.sleep(max(0.0, min(pause_s * random.uniform(0.8, 1.2), until - now())))
                pause_s = min(_LONGEST_PAUSE, pause_s * 1.3)

    def states(self, ids: Sequence[int]) -> Conversation[dict[int, str | None]]:
        """Tell the status of jobs; None where there is no such job."""
        rows = yield from self.run("states", [list(ids)])
        found = {int(id_ or 0): status for id_, status in rows}
        return {id_: found.get(id_) for id_ in ids}

    # Changing

    def reap_all(self) -> Conversation[None]:
        """Take all jobs back whose lease has expired; the tally says what they are now."""
        while reaped := (yield from self.reap(CHUNK)):
            self.tally.update(reaped)

    def retry_ids(self, ids: Sequence[int]) -> Conversation[list[Result]]:
        """Make failed jobs pending again, cancelled ones too: retried, duplicate, not failed, or unknown."""
        return (yield from self.change_ids(ids, self.retry_chunk, "not failed"))

    def change_ids(
        self, ids: Sequence[int], change: Callable[[list[int]], Conversation[dict[int, str]]], otherwise: str
    ) -> Conversation[list[Result]]:
        """Change named jobs, and say of each what it is; `otherwise` is said of those that are in another state."""
        results: dict[int, str] = {}
        wanted = sorted(set(ids))
        for begin in range(0, len(wanted), CHUNK):
            results |= yield from change(wanted[begin : begin + CHUNK])
        rest = [id_ for id_ in wanted if id_ not in results]
        if rest:
            states = yield from self.states(rest)
            results |= {id_: otherwise if state else "unknown" for id_, state in states.items()}
        return [Result(id_, results[id_]) for id_ in dict.fromkeys(ids)]

    def retry_chunk(self, ids: Sequence[int]) -> Conversation[dict[int, str]]:
        """Retry some; where a dedupe key was taken in the same moment, one by one."""
        try:
            rows = yield from self.run("retry_ids", [ids])
        except StatementError as error:
            if error.sqlstate != "23505":
                raise
            if len(ids) == 1:
                return {ids[0]: "duplicate"}
            results: dict[int, str] = {}
            for id_ in ids:
                results |= yield from self.retry_chunk([id_])
            return results
        return {int(id_ or 0): word or "" for id_, word in rows}

    def retry_queues(self, queues: Sequence[str] | None) -> Conversation[None]:
        """Retry all failed jobs of some queues, or of all; cancelled ones stay. The tally counts."""
        if queues is None:
            rows = yield from self.run("failed_queues")
            queues = [row[0] or "" for row in rows]
        for queue in queues:
            while rows := (yield from self.run("failed_ids", [queue, self.cursor[queue], CHUNK])):
                ids = _ids(rows)
                words = yield from self.retry_chunk(ids)
                self.tally.update(words.values())
                self.cursor[queue] = ids[-1]

    def cancel_ids(self, ids: Sequence[int]) -> Conversation[list[Result]]:
        """Cancel jobs: cancelled, not open (it had ended before), or unknown."""
        return (yield from self.change_ids(ids, self.cancel_chunk, "not open"))

    def cancel_chunk(self, ids: Sequence[int]) -> Conversation[dict[int, str]]:
        rows = yield from self.run("cancel", [ids])
        return {int(id_ or 0): word or "" for id_, word in rows}

    def cancel_queue(self, queue: str) -> Conversation[None]:
        """Cancel all jobs of a queue that are pending or running; the tally counts them."""
        while rows := (yield from self.run("open_ids", [queue, CHUNK])):
            words = yield from self.cancel_chunk(sorted(_ids(rows)))
            self.tally.update(words.values())

    def purge(self, older_than: float, *, failed: bool) -> Conversation[None]:
        """Delete jobs that were done so long ago (seconds), the failed ones too where asked for; the tally counts."""
        for name in ("purge_done", "purge_failed") if failed else ("purge_done",):
            deleted = PURGE_BATCH
            while deleted == PURGE_BATCH:
                deleted = len((yield from self.run(name, [older_than, PURGE_BATCH])))
                self.tally["purged"] += deleted


def _ids(rows: Sequence[Row]) -> list[int]:
    return [int(row[0] or 0) for row in rows]
