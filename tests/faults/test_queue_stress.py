"""The queue's books close to the row, whatever happens to workers, sessions and the server."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from tests.fixtures.guard import clean_environment
from tests.fixtures.measure import Measure
from tests.fixtures.queue import ForkServer, Queue
from tests.fixtures.server import PrivateServer

JOBS = 800
BOOKS = """
CREATE TABLE books (job bigint, claim bigint, was text, became text, old_token text, token text, attempts int, reason text);
CREATE FUNCTION keep_books() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO books VALUES (NEW.id, OLD.attempts, OLD.status, NEW.status, OLD.claim_token, NEW.claim_token,
                              NEW.attempts - OLD.attempts, NEW.reason);
    RETURN NULL;
END $$;
CREATE TRIGGER keep_books AFTER UPDATE ON {jobs} FOR EACH ROW EXECUTE FUNCTION keep_books();
"""
STEPS = """
SELECT job, token,
       CASE WHEN became = 'done' THEN 'done'
            WHEN became = 'running' THEN 'extended'
            WHEN attempts = -1 THEN 'released'
            WHEN reason = 'lease expired' THEN 'reaped'
            ELSE 'retrying' END
  FROM books WHERE was = 'running'
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_books_close(
    seed: int, private_server: PrivateServer, forkserver: ForkServer, measure: Measure, tmp_path: Path
) -> None:
    """Each claim ends in exactly one way; no job is finished twice, none is lost; what workers were told is so."""
    queue = Queue(private_server, private_server.dsn, "stressed", forkserver)
    queue.ok("migrate")
    try:
        queue.sql(BOOKS)
        queue.sql(
            "INSERT INTO {jobs} (payload, max_attempts, priority, run_at, dedupe_key) SELECT to_jsonb(n), 1000, n %% 3, "
            "CASE WHEN n %% 4 = 0 THEN now() + n * interval '1 ms' END, 'k' || n FROM generate_series(1, %s) AS n", JOBS
        )  # fmt: skip
        make_trouble(seed, private_server, queue.schema, tmp_path)
        check_books(queue, tmp_path)
        steps = Counter(step for _, _, step in queue.sql(STEPS))
        measure("queue under stress", f"seed {seed}", **{name: str(count) for name, count in sorted(steps.items())})
        assert all(steps[name] > 20 for name in ("done", "extended", "released", "reaped", "retrying")), steps
    finally:
        queue.sql("DROP SCHEMA stressed CASCADE")
        queue.sql("DROP TABLE IF EXISTS books; DROP FUNCTION IF EXISTS keep_books")


def make_trouble(seed: int, server: PrivateServer, schema: str, folder: Path) -> None:
    """Let workers work for some seconds, while they are killed and their sessions and the server are ended."""
    luck = random.Random(seed)
    argv = [sys.executable, "-m", "tests.fixtures.queue_workers", server.dsn, schema, str(folder), str(seed)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=clean_environment(), process_group=0) as workers:
        try:
            begun = time.monotonic()
            restarted = False
            while (passed := time.monotonic() - begun) < 8:
                if passed > 4 and not restarted:
                    server.restart("immediate")
                    restarted = True
                terminate_some(server, luck)
                time.sleep(luck.uniform(0.05, 0.3))
            assert workers.stdin is not None
            workers.stdin.close()
            assert workers.wait(60) == 0
        finally:
            if workers.poll() is None:
                os.killpg(workers.pid, signal.SIGKILL)


def terminate_some(server: PrivateServer, luck: random.Random) -> None:
    """End a session or two of workers."""
    try:
        pids = [row[0] for row in server.sessions()]
        for pid in luck.sample(pids, min(len(pids), luck.randint(0, 2))):
            server.sql("SELECT pg_terminate_backend(%s)", pid)
    except psycopg.OperationalError:  # it is just being restarted
        return


def check_books(queue: Queue, folder: Path) -> None:
    """Compare what the rows say, what the trigger saw and what the workers were told."""
    assert queue.statuses() == {"done": JOBS}
    [[claims]] = queue.sql("SELECT count(*) FROM books WHERE was = 'pending' AND became = 'running'")
    taken = queue.sql(STEPS)
    assert claims == sum(step != "extended" for _, _, step in taken)
    assert queue.sql("SELECT count(*), count(DISTINCT job) FROM books WHERE became = 'done'") == [(JOBS, JOBS)]
    steps = queue.sql("SELECT DISTINCT was, became FROM books WHERE was <> became OR token <> old_token")
    assert set(steps) == {("pending", "running"), ("running", "done"), ("running", "pending")}
    assert queue.sql(
        "SELECT max(n) FROM (SELECT count(*) AS n FROM books WHERE became = 'running' AND was = 'pending' GROUP BY job, token) AS c"
    ) == [(1,)]
    seen = set(taken)
    told: Counter[str] = Counter()
    for file in folder.glob("*.log"):
        for line in file.read_text().splitlines():
            verb, job, token, answer = [*line.split(), "", "", ""][:4]
            told[f"{verb} {answer}"] += 1
            if answer in ("done", "extended", "released", "retrying"):
                assert (int(job), token, answer) in seen, line
            if verb == "complete" and answer in ("already", "lost"):
                assert ((int(job), token, "done") in seen) == (answer == "already"), line
    assert told["complete done"] > JOBS * 0.8
    assert told["complete lost"] + told["fail lost"] + told["release lost"] + told["extend lost"] > 5, told
