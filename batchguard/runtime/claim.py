"""`batchguard jobs claim`, and what ends a claim: for scripts that do one thing at a time."""

import contextlib
import os
import random
import select
import time
from collections.abc import Iterator, Sequence

from batchguard.adapters.clock import now
from batchguard.core.errors import BatchguardError, SystemLimitError
from batchguard.core.job import Claim, ClaimedJob, Result, Verb
from batchguard.core.job_settings import JobSettings
from batchguard.runtime.queue import Queue

_SHORTEST_PAUSE = 0.2
_LONGEST_PAUSE = 2.0


class Claimed:
    """Jobs on their way to a reader; those that do not get there are released."""

    def __init__(self, jobs: Sequence[ClaimedJob]) -> None:
        self.jobs = jobs
        self.written = 0

    def write_to(self, fd: int) -> None:
        """Write a line for each job.

        Raises:
            OSError: the reader has gone, or there is no room; `written` counts the lines that are out.
        """
        for job in self.jobs:
            _write(fd, job.to_line().encode() + b"\n")
            self.written += 1


def _write(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])


@contextlib.contextmanager
def claim_jobs(
    dsn: str, settings: JobSettings, queues: Sequence[str], limit: int, lease: float, wait: float
) -> Iterator[Claimed]:
    """Claim jobs, and release those that are not written by the end.

    Args:
        dsn: the database's conninfo or URI.
        settings: of the queue.
        queues: which ones, in their order.
        limit: how many jobs at most.
        lease: seconds for which they are ours.
        wait: seconds to wait for the first one.

    Raises:
        BatchguardError: a line for the user.
    """
    with contextlib.closing(Queue(dsn, settings, "claim")) as queue:
        claimed = Claimed(_wait_for_jobs(queue, queues, limit, lease, wait))
        try:
            yield claimed
        except BaseException as error:
            unwritten = claimed.jobs[claimed.written :]
            released = [Claim(job.id, job.claim_token) for job in unwritten]
            with contextlib.suppress(BatchguardError):  # then they come back when the lease is over
                queue.persist(lambda: queue.end("release", released))
            if isinstance(error, BrokenPipeError) or not isinstance(error, OSError):
                raise
            raise SystemLimitError(
                f"cannot write the jobs ({error.strerror}): {len(released)} of {len(claimed.jobs)} released, exit 69."
            ) from None


def _wait_for_jobs(queue: Queue, queues: Sequence[str], limit: int, lease: float, wait: float) -> list[ClaimedJob]:
    until = now() + wait
    pause_s = _SHORTEST_PAUSE
    while True:
        queue.persist(queue.reap)
        jobs: list[ClaimedJob] = []
        for name in queues:
            if len(jobs) < limit:
                try:
                    jobs += queue.claim_once(name, limit - len(jobs), lease)
                except BatchguardError:
                    if not jobs:  # those of the queues before are ours already
                        raise
                    break
        if jobs or now() >= until:
            return jobs
        time.sleep(min(pause_s * random.uniform(0.7, 1.3), max(0.0, until - now())))
        pause_s = min(_LONGEST_PAUSE, pause_s * 1.5)


def end_jobs(dsn: str, settings: JobSettings, verb: Verb, claims: Sequence[Claim]) -> list[Result]:
    """Complete, fail, release or extend jobs; after a session that ended, on another one.

    Raises:
        BatchguardError: a line for the user.
    """
    if not claims:
        return []
    with contextlib.closing(Queue(dsn, settings, verb)) as queue:
        return queue.persist(lambda: queue.end(verb, claims))
