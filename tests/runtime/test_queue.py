"""Answers that get lost, servers that go away, and neighbours on the same table."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.fixtures.guard import Run, StartRun
from tests.fixtures.proxy import MakeProxy, Proxy
from tests.fixtures.queue import Done, ForkServer, Queue
from tests.fixtures.server import PrivateServer, Server
from tests.fixtures.waiting import until


@pytest.fixture
def proxied(plain_jobs: Queue, server: Server, make_proxy: MakeProxy) -> tuple[Queue, Proxy]:
    """Give a queue behind a proxy."""
    proxy = make_proxy(server.host_and_port)
    dsn = f"{server.dsn} host={proxy.host} port={proxy.port}"
    return Queue(server, dsn, plain_jobs.schema, plain_jobs.forkserver), proxy


GATE = """
CREATE TABLE {gate} ();
CREATE FUNCTION {gate}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN LOCK TABLE {gate}; RETURN NULL; END $$;
CREATE TRIGGER gate AFTER INSERT OR UPDATE ON {jobs} FOR EACH ROW EXECUTE FUNCTION {gate}();
"""
"""Lets a statement that changes a row wait at its end for as long as somebody has locked the gate."""


@contextmanager
def losing_the_answer(jobs: Queue, proxy: Proxy, is_done: Callable[[], object]) -> Iterator[None]:
    """Let a statement reach the server and be committed there, and cut the connection before the answer is back."""
    jobs.sql(GATE.replace("{gate}", f"{jobs.schema}.gate"))
    with jobs.server.connect() as other, other.transaction():
        other.execute(f"LOCK TABLE {jobs.schema}.gate")
        yield
        until(lambda: jobs.sql("SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'relation'"))
        proxy.freeze()
    until(is_done)
    proxy.cut()
    proxy.thaw()


def begin(start: StartRun, jobs: Queue, *argv: str) -> Run:
    """Start a command of the queue."""
    return start("jobs", argv[0], "--schema", jobs.schema, *argv[1:], dsn=jobs.dsn)


def test_a_claim_whose_answer_is_lost_is_looked_up(proxied: tuple[Queue, Proxy], start: StartRun) -> None:
    """The jobs that the server gave out are printed, on their first attempt; no others are claimed instead."""
    jobs, proxy = proxied
    jobs.put(1, 2, 3, 4)
    with losing_the_answer(jobs, proxy, lambda: jobs.statuses().get("running") == 2):
        claim = begin(start, jobs, "claim", "-n", "2")
    assert (claim.code(), claim.err) == (0, "")
    claimed = [json.loads(line) for line in claim.out.splitlines()]
    assert [(job["payload"], job["attempt"]) for job in claimed] == [(1, 1), (2, 1)]
    assert jobs.statuses() == {"running": 2, "pending": 2}


@pytest.mark.parametrize(("verb", "status"), [("complete", "done"), ("fail", "pending"), ("release", "pending")])
def test_an_end_whose_answer_is_lost_is_repeated(
    verb: str, status: str, proxied: tuple[Queue, Proxy], start: StartRun
) -> None:
    """It is asked again on a new session, and is told "already"."""
    jobs, proxy = proxied
    jobs.put(1)
    [job] = jobs.claim()
    with losing_the_answer(jobs, proxy, lambda: jobs.statuses() == {status: 1}):
        end = begin(start, jobs, verb, str(job["id"]), job["claim_token"])
    assert (end.code(), json.loads(end.out)["result"]) == (0, "already")


def test_an_enqueue_whose_answer_is_lost_is_not_repeated(proxied: tuple[Queue, Proxy], start: StartRun) -> None:
    """Nobody knows whether the job came in, and the message says so; it is not enqueued twice."""
    jobs, proxy = proxied
    with losing_the_answer(jobs, proxy, lambda: jobs.statuses() == {"pending": 1}):
        enqueue = begin(start, jobs, "enqueue", "1")
    assert enqueue.code() == 69
    assert "they are enqueued, or they are not, exit 69" in enqueue.err
    assert jobs.statuses() == {"pending": 1}


def test_an_enqueue_that_is_interrupted_leaves_nothing(plain_jobs: Queue, start: StartRun) -> None:
    """A session that ends before the commit: nothing is enqueued, and the message says that."""
    lines = "".join(json.dumps({"payload": n, "dedupe_key": f"k{n}"}) + "\n" for n in range(100))
    with plain_jobs.server.connect() as other, other.transaction():
        other.execute(f"LOCK TABLE {plain_jobs.table} IN SHARE ROW EXCLUSIVE MODE")
        done: list[Done] = []
        thread = threading.Thread(target=lambda: done.append(plain_jobs("enqueue", "--jsonl", stdin=lines)))
        thread.start()
        [[pid]] = until(
            lambda: plain_jobs.sql(
                "SELECT pid FROM pg_locks WHERE NOT granted AND relation = %s::regclass", plain_jobs.table
            )
        )
        plain_jobs.sql("SELECT pg_terminate_backend(%s)", pid)
        thread.join()
    assert done[0].code == 69
    assert "ended the session (57P01) before the jobs were committed, exit 69; nothing is enqueued" in done[0].err
    assert plain_jobs.statuses() == {}


def test_wait_outlives_a_restart(private_server: PrivateServer, forkserver: ForkServer, start: StartRun) -> None:
    """A server that is started again while somebody waits for a job: the wait goes on."""
    jobs = Queue(private_server, private_server.dsn, "awaited", forkserver)
    jobs.ok("migrate")
    jobs.put(1)
    [job] = jobs.claim()
    wait = begin(start, jobs, "wait", str(job["id"]), "--wait", "60s")
    until(private_server.sessions)
    private_server.stop("fast")
    private_server.start()
    assert jobs.end("complete", job).code == 0
    assert (wait.code(), wait.err) == (0, "")
    jobs.sql("DROP SCHEMA awaited CASCADE")


def test_no_server(plain_jobs: Queue, private_server: PrivateServer) -> None:
    """A server that is not there at the first try is an error at once."""
    private_server.stop("fast")
    for argv in (("claim",), ("wait", "1"), ("enqueue", "1")):
        done = plain_jobs(*argv, dsn=private_server.dsn)
        assert done.code == 69
        assert "connection refused" in done.err.lower()


def test_rows_that_others_refer_to_are_claimed(plain_jobs: Queue) -> None:
    """An open transaction that refers to a job by foreign key does not make the claim pass it over."""
    plain_jobs.put(1)
    plain_jobs.sql(f"CREATE TABLE {plain_jobs.schema}.mails (job bigint REFERENCES {{jobs}})")
    with plain_jobs.server.connect() as other, other.transaction():
        other.execute(f"INSERT INTO {plain_jobs.schema}.mails SELECT id FROM {plain_jobs.table}")
        [job] = plain_jobs.claim()
    assert plain_jobs.end("complete", job).code == 0


def test_rows_that_others_work_on_are_passed_over(plain_jobs: Queue) -> None:
    """A claim waits for nobody: what another transaction has locked is left, and the next ones are taken."""
    plain_jobs.put(1, 2, 3)
    with plain_jobs.server.connect() as other, other.transaction():
        other.execute(f"SELECT FROM {plain_jobs.table} WHERE payload = '1' FOR UPDATE")
        assert [job["payload"] for job in plain_jobs.claim("-n", "2")] == [2, 3]


def test_reap_gives_way_to_a_complete_in_flight(plain_jobs: Queue) -> None:
    """A job whose lease is over, and whose completion is not committed yet, is not taken back."""
    plain_jobs.put(1)
    plain_jobs.claim()
    plain_jobs.expire()
    with plain_jobs.server.connect() as other, other.transaction():
        other.execute(f"UPDATE {plain_jobs.table} SET status = 'done', finished_at = now(), claimed_until = NULL")
        assert plain_jobs.ok("reap").lines == [{"retrying": 0, "failed": 0}]
    assert plain_jobs.statuses() == {"done": 1}


def test_retry_beside_a_new_job_with_the_same_key(plain_jobs: Queue) -> None:
    """A dedupe key that is taken while the retry is under way holds back its own job, and none of the others."""
    lines = "".join(json.dumps({"payload": n, "dedupe_key": f"k{n}"}) + "\n" for n in range(5))
    plain_jobs.ok("enqueue", "--jsonl", stdin=lines)
    plain_jobs.end("fail", *plain_jobs.claim("-n", "5"), retry=False)
    with plain_jobs.server.connect() as other, other.transaction():
        other.execute(f"INSERT INTO {plain_jobs.table} (payload, dedupe_key) VALUES ('9', 'k3')")
        done: list[Done] = []
        thread = threading.Thread(target=lambda: done.append(plain_jobs("retry", "--all-queues")))
        thread.start()
        until(lambda: plain_jobs.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'transactionid'"))
    thread.join()
    assert (done[0].code, done[0].lines) == (0, [{"retried": 4, "duplicates": 1}])


@pytest.mark.parametrize("ids", [[1, 2, 3, 4], [4, 3, 2, 1]])
def test_bulk_completes_do_not_lock_one_another_out(ids: list[int], plain_jobs: Queue) -> None:
    """Rows are locked in the order of their ids, whatever the order of the lines: no deadlock with who does the same."""
    plain_jobs.put(1, 2, 3, 4)
    claimed = {job["id"]: job for job in plain_jobs.claim("-n", "4")}
    with plain_jobs.server.connect() as other, other.transaction():
        other.execute(f"SELECT FROM {plain_jobs.table} WHERE id = 1 FOR UPDATE")
        done: list[Done] = []
        thread = threading.Thread(
            target=lambda: done.append(plain_jobs.end("complete", *(claimed[id_] for id_ in ids)))
        )
        thread.start()
        until(lambda: plain_jobs.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'transactionid'"))
        other.execute(f"SELECT FROM {plain_jobs.table} WHERE id > 1 FOR UPDATE NOWAIT")
    thread.join()
    assert [line["result"] for line in done[0].lines] == ["done"] * 4
    assert [line["id"] for line in done[0].lines] == ids


def test_a_session_that_ends_after_long_progress_is_replaced(plain_jobs: Queue, start: StartRun) -> None:
    """What counts is how long the server has been away, not how long the command runs; the tally goes on."""
    plain_jobs.sql(
        "INSERT INTO {jobs} (payload, status, finished_at) SELECT '1', 'done', now() - interval '2 days' "
        "FROM generate_series(1, 10001)"
    )
    gate = f"{plain_jobs.schema}.gate"
    plain_jobs.sql(
        GATE.replace("{gate}", gate).replace("INSERT OR UPDATE", "DELETE").replace("EACH ROW", "EACH STATEMENT")
    )
    blocked = "SELECT pid FROM pg_locks WHERE NOT granted AND locktype = 'relation'"
    with plain_jobs.server.connect() as other:
        with other.transaction():
            other.execute(f"LOCK TABLE {gate}")
            purge = begin(start, plain_jobs, "purge", "--older-than", "1d")
            until(lambda: plain_jobs.sql(blocked))
        until(lambda: plain_jobs.statuses()["done"] <= 5001)
        [[pid]] = until(
            lambda: plain_jobs.sql("SELECT pid FROM pg_stat_activity WHERE application_name = 'batchguard jobs purge'")
        )
        plain_jobs.sql("SELECT pg_terminate_backend(%s)", pid)
    assert purge.code() == 0
    assert plain_jobs.statuses() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_claim_that_is_ended_releases_all_of_it(number: signal.Signals, plain_jobs: Queue, start: StartRun) -> None:
    """Jobs of a first queue that are ours already, and those of a claim that is under way when the signal comes."""
    plain_jobs.put(1, queue="a")
    plain_jobs.put(2, queue="b")
    gate = f"{plain_jobs.schema}.gate"
    plain_jobs.sql(
        GATE.replace("{gate}", gate).replace(
            "FOR EACH ROW", "FOR EACH ROW WHEN (NEW.queue = 'b' AND NEW.status = 'running')"
        )
    )
    with plain_jobs.server.connect() as other, other.transaction():
        other.execute(f"LOCK TABLE {gate}")
        claim = begin(start, plain_jobs, "claim", "-n", "2", "--queue", "a", "--queue", "b")
        until(lambda: plain_jobs.sql("SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'relation'"))
        claim.popen.send_signal(number)
        until(lambda: plain_jobs.sql("SELECT 1 FROM {jobs} WHERE queue = 'a' AND status = 'pending'"))
    assert claim.code() == 128 + number
    assert claim.out == ""
    assert plain_jobs.sql("SELECT attempts FROM {jobs} WHERE queue = 'a'") == [(0,)]
