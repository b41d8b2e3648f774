"""`batchguard jobs claim`, and what ends a claim: for scripts that do one thing at a time."""

import contextlib
import random
import signal
import time
from collections.abc import Iterator, Sequence

from batchguard.adapters import report
from batchguard.adapters.clock import now
from batchguard.core.errors import BatchguardError, SignalReceived, SystemLimitError, UnreachableError
from batchguard.core.job import Claim, ClaimedJob, Result, Verb
from batchguard.core.job_settings import JobSettings
from batchguard.core.messages import unwritten
from batchguard.runtime.queue import Queue, new_token

_SHORTEST_PAUSE = 0.2
_LONGEST_PAUSE = 2.0


class Claimed:
    """Jobs on their way to a reader; those that do not get there are released."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        """Of the claims that may have given us something."""
        self.jobs: list[ClaimedJob] = []
        self.written: list[int] = []

    def write_to(self, fd: int) -> None:
        """Write a line for each job.

        Raises:
            OSError: the reader has gone, or there is no room; `written` has the jobs whose lines are out.
        """
        for job in self.jobs:
            report.write_all(fd, job.to_line().encode() + b"\n")
            self.written.append(job.id)


@contextlib.contextmanager
def claim_jobs(
    dsn: str, settings: JobSettings, queues: Sequence[str], limit: int, lease: float, wait: float
) -> Iterator[Claimed]:
    """Claim jobs, and release those that are not written by the end, also when a signal comes meanwhile.

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
    claimed = Claimed()
    with contextlib.closing(Queue(dsn, settings, "claim")) as queue, _signals_raised():
        try:
            _wait_for_jobs(queue, claimed, queues, limit, lease, wait)
            yield claimed
        except (OSError, KeyboardInterrupt, SignalReceived) as error:
            released = 0
            with contextlib.suppress(BatchguardError):  # then they come back when the lease is over
                released = queue.persist(lambda: queue.release_all(claimed.tokens, claimed.written))
            if not isinstance(error, OSError):
                raise
            raise WriteError(unwritten(error.strerror, released, len(claimed.jobs)), error.errno) from None


class WriteError(SystemLimitError):
    """The reader has gone, or there is no room for what is to be written; `number` is the errno."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.number = number


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Let TERM and HUP end us as Ctrl-C does, with time to release."""

    def interrupt(number: int, _: object) -> None:
        raise SignalReceived(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_jobs(
    queue: Queue, claimed: Claimed, queues: Sequence[str], limit: int, lease: float, wait: float
) -> None:
    until = now() + wait
    if wait:
        queue.give_up_at = until
    pause_s = _SHORTEST_PAUSE
    while True:
        try:
            queue.persist(lambda: queue.release_all(claimed.tokens))  # of a try whose answer never came
            claimed.tokens.clear()
            queue.persist(queue.reap)
            for name in queues:
                if len(claimed.jobs) < limit:
                    claimed.tokens.append(new_token())
                    claimed.jobs += queue.claim_once(name, limit - len(claimed.jobs), lease, claimed.tokens[-1])
            if not claimed.jobs:
                claimed.tokens.clear()
        except UnreachableError:
            # What one queue gave is ours, though the next could not be asked; and who waits, waits for the server too.
            if not claimed.jobs and (now() >= until or not queue.was_connected):
                raise
        if claimed.jobs or now() >= until:
            return
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
