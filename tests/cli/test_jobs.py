"""`batchguard jobs` from a shell's point of view; each test in all the circumstances that must not matter."""

import json
import re
import threading
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from tests.fixtures.queue import Done, Queue
from tests.fixtures.waiting import until


def test_one_job_in_and_out(jobs: Queue) -> None:
    """A job goes in, is claimed with its token and payload, and is done; nothing is left to claim."""
    printed = jobs.ok("enqueue", '{"to": "a@example.org"}', "--queue", "mail", "--priority", "-3").out
    [job] = jobs.claim("--queue", "mail", "--lease", "5m")
    created = job["created_at"]
    assert job == {
        "id": int(printed),
        "claim_token": job["claim_token"],
        "queue": "mail",
        "priority": -3,
        "attempt": 1,
        "max_attempts": 5,
        "created_at": created,
        "claimed_until": job["claimed_until"],
        "lease_s": 300.0,
        "dedupe_key": None,
        "idempotency_key": job["idempotency_key"],
        "payload": {"to": "a@example.org"},
    }
    lease = datetime.fromisoformat(job["claimed_until"]) - datetime.now(UTC)
    assert timedelta(minutes=4) < lease < timedelta(minutes=6)
    assert job["idempotency_key"].startswith(f"{jobs.schema}.jobs:{printed.strip()}:20")
    done = jobs.ok("complete", printed.strip(), job["claim_token"])
    assert done.lines == [{"id": int(printed), "result": "done"}]
    assert jobs("claim", "--queue", "mail").code == 3
    assert jobs.statuses() == {"done": 1}


def test_order(jobs: Queue) -> None:
    """Lower priority first, then the older one, and what a batch of lines says, in the order of the lines."""
    for priority in (5, 0, -5):
        jobs.put(*range(3), priority=priority)
    assert [job["priority"] for job in jobs.claim("-n", "5")] == [-5, -5, -5, 0, 0]
    assert [job["payload"] for job in jobs.claim("-n", "10")] == [2, 0, 1, 2]


def test_delayed_jobs_wait_for_their_time(jobs: Queue) -> None:
    """`--in` and `--run-at` keep a job back; one whose time has come is claimed, though others are ready."""
    jobs.ok("enqueue", '"later"', "--in", "1h")
    jobs.ok("enqueue", '"never yet"', "--run-at", "2999-01-01T00:00:00+09:00")
    assert jobs("claim").code == 3
    jobs.ok("enqueue", '"due"', "--run-at", "2026-01-01T00:00:00Z")
    jobs.put(*range(10))
    claimed = jobs.claim("-n", "4")
    assert len(claimed) == 4
    assert "due" in [job["payload"] for job in claimed]
    assert jobs.ok("stats", "--json").lines[0]["delayed"] == 2


def test_neither_side_starves(jobs: Queue) -> None:
    """One at a time, jobs that are ready and jobs whose time has come take turns; together they get half each."""
    jobs.put(*["ready"] * 40)
    jobs.put(*["due"] * 40, run_at="2026-01-01T00:00:00Z")
    halves = [job["payload"] for job in jobs.claim("-n", "20")]
    assert halves.count("due") == halves.count("ready") == 10
    singles = [jobs.claim()[0]["payload"] for _ in range(16)]
    assert {"due", "ready"} == set(singles)


def test_several_queues_in_their_order(jobs: Queue) -> None:
    """Queues are looked through one after the other, until there are enough jobs."""
    for queue in ("a", "b", "c"):
        jobs.put(1, 2, queue=queue)
    claimed = jobs.claim("-n", "3", "--queue", "b", "--queue", "a", "--queue", "b")
    assert [job["queue"] for job in claimed] == ["b", "b", "a"]


def test_fail_comes_back_later_and_ends_failed(jobs: Queue) -> None:
    """The pause doubles with each attempt, less up to a quarter; after the last attempt the job has failed."""
    jobs.put({}, max_attempts=3)
    for expected in (10, 20):
        [job] = jobs.claim()
        done = jobs.ok("fail", str(job["id"]), job["claim_token"], "--error", "no route\nto host", "--exit-code", "7")
        assert done.lines[0]["result"] == "retrying"
        [[pause]] = jobs.sql("SELECT extract(epoch FROM run_at - clock_timestamp()) FROM {jobs}")
        assert expected * 0.7 < pause <= expected
        assert jobs("claim").code == 3
        jobs.sql("UPDATE {jobs} SET run_at = now()")
    [job] = jobs.claim()
    assert job["attempt"] == job["max_attempts"] == 3
    done = jobs.end("fail", job, error="gone\0bad", exit_code=75)
    assert done.lines[0]["result"] == "failed"
    [shown] = jobs.ok("show", str(job["id"]), "--json").lines
    assert (shown["status"], shown["reason"], shown["exit_code"]) == ("failed", "exit", 75)
    assert shown["last_error"] == "gone\\x00bad"
    assert shown["finished_at"] is not None
    assert shown["claimed_until"] is None


def test_fail_for_good_and_at_a_given_time(jobs: Queue) -> None:
    """`--no-retry` ends a job at once, `--retry-in` says when it is back; both may stand in the lines as well."""
    jobs.put(1, 2, 3, 4)
    one, two, three, four = jobs.claim("-n", "4")
    assert jobs("fail", str(one["id"]), one["claim_token"], "--no-retry").lines[0]["result"] == "failed"
    assert jobs("fail", str(two["id"]), two["claim_token"], "--retry-in", "0").lines[0]["result"] == "retrying"
    done = jobs(
        "fail", "--stdin", "--retry-in", "1h",
        stdin=json.dumps({**three, "retry_in": "2h"}) + "\n" + json.dumps({**four, "retry": False}) + "\n",
    )  # fmt: skip
    assert [line["result"] for line in done.lines] == ["retrying", "failed"]
    assert jobs.claim()[0]["payload"] == 2
    [[pause]] = jobs.sql("SELECT extract(epoch FROM run_at - clock_timestamp()) FROM {jobs} WHERE id = %s", three["id"])
    assert 7100 < pause <= 7200
    assert jobs.sql("SELECT reason FROM {jobs} WHERE status = 'failed' ORDER BY id") == [("no retry",), ("no retry",)]


def test_release_refunds_the_attempt(jobs: Queue) -> None:
    """A released job is back at its place at once, as if it had not been claimed."""
    jobs.put(1, 2)
    [job] = jobs.claim()
    assert jobs.end("release", job).lines == [{"id": job["id"], "result": "released"}]
    [again] = jobs.claim()
    assert (again["id"], again["attempt"]) == (job["id"], 1)
    assert again["claim_token"] != job["claim_token"]


def test_extend_never_shortens(jobs: Queue) -> None:
    """A lease is extended from now on, and stays where it is when that would be earlier."""
    jobs.put(1)
    [job] = jobs.claim("--lease", "1h")
    until = "SELECT claimed_until FROM {jobs}"
    before = jobs.sql(until)
    assert jobs.ok("extend", str(job["id"]), job["claim_token"], "--lease", "1m").lines[0]["result"] == "extended"
    assert jobs.sql(until) == before
    assert jobs.end("extend", job, lease="2h").lines[0]["result"] == "extended"
    assert jobs.sql(until) > before


def test_ends_may_be_repeated(jobs: Queue) -> None:
    """Complete, fail and release with the same token again are success: the first answer may have been lost."""
    jobs.put(1, 2, 3)
    one, two, three = jobs.claim("-n", "3")
    for verb, job, first in (("complete", one, "done"), ("fail", two, "retrying"), ("release", three, "released")):
        for expected in (first, "already", "already"):
            done = jobs.end(verb, job)
            assert (done.code, done.lines[0]["result"], done.err) == (0, expected, "")


def test_a_slow_worker_has_lost_its_job(jobs: Queue) -> None:
    """Reaped, or claimed again, a job is not the slow worker's any more; before that, a late complete counts."""
    jobs.put(1, 2)
    [job] = jobs.claim()
    jobs.expire()
    assert jobs.ok("reap").lines == [{"retrying": 1, "failed": 0}]
    for verb in ("complete", "fail", "release", "extend"):
        done = jobs.end(verb, job)
        assert (done.code, done.lines[0]["result"]) == (76, "lost")
        assert f"lost job {job['id']}" in done.err
    jobs.sql("UPDATE {jobs} SET run_at = now() - interval '1 day'")
    reclaimed = jobs.claim("-n", "2")
    assert {each["attempt"] for each in reclaimed} == {1, 2}
    for verb in ("complete", "fail", "release", "extend"):
        assert jobs.end(verb, job).code == 76
    assert jobs.statuses() == {"running": 2}
    jobs.expire()
    assert jobs.end("complete", *reclaimed).code == 0
    assert jobs.statuses() == {"done": 2}


def test_crashes_count(jobs: Queue) -> None:
    """A job whose worker dies each time has failed after its last attempt; claims reap too."""
    jobs.put(1, max_attempts=2)
    for _ in range(2):
        assert len(jobs.claim()) == 1
        jobs.expire()
        assert jobs("claim").code == 3
        jobs.sql("UPDATE {jobs} SET run_at = now() WHERE status = 'pending'")
    [shown] = jobs.ok("list", "--status", "failed", "--json").lines
    assert (shown["reason"], shown["attempts"]) == ("lease expired", 2)


def test_many_jobs_with_keys(jobs: Queue) -> None:
    """A dedupe key is in use while its job is pending or running, and free again afterwards; a queue has its own."""
    lines = "".join(json.dumps({"payload": n, "dedupe_key": f"k{n % 3}"}) + "\n" for n in range(6))
    assert jobs.ok("enqueue", "--jsonl", stdin=lines).lines == [{"enqueued": 3, "duplicates": 3}]
    assert jobs.ok("enqueue", "--jsonl", "--queue", "other", stdin=lines).lines[0]["enqueued"] == 3
    claimed = jobs.claim("-n", "3")
    assert [job["payload"] for job in claimed] == [0, 1, 2]
    same = jobs.ok("enqueue", "9", "--dedupe-key", "k1")
    assert int(same.out) == claimed[1]["id"]
    refused = jobs("enqueue", "9", "--dedupe-key", "k1", "--fail-on-duplicate")
    assert (refused.code, refused.out) == (5, "")
    assert f"job {claimed[1]['id']}" in refused.err
    assert jobs.end("complete", *claimed).code == 0
    assert int(jobs.ok("enqueue", "9", "--dedupe-key", "k1").out) > claimed[2]["id"]
    none = jobs("enqueue", "--jsonl", "--fail-on-duplicate", stdin=lines)
    assert (none.code, none.lines) == (5, [{"enqueued": 0, "duplicates": 4}])
    assert jobs.sql("SELECT count(*) FROM {jobs} WHERE queue = 'default' AND status = 'pending'") == [(1,)]


@pytest.mark.parametrize(
    ("form", "data", "payloads"),
    [
        ("--lines", b'{"a": 1}\n[2]\n"x"', [{"a": 1}, [2], "x"]),
        ("--text", "caf\u00e9 \\N\t\"q\"\n移行\n".encode(), ['café \\N\t"q"', "移行"]),
        ("--null", b"/in/a b\n.csv\0/in/c.csv\0", ["/in/a b\n.csv", "/in/c.csv"]),
        ("--jsonl", b'{"payload": null}\n {"priority" : 2, "payload":{"x":[1,{"y":"z"}]}} \n', [None, {"x": [1, {"y": "z"}]}]),
    ],
)  # fmt: skip
def test_forms_of_input(form: str, data: bytes, payloads: list[object], jobs: Queue) -> None:
    """JSON lines, envelopes, texts, and what find -print0 writes."""
    assert jobs.ok("enqueue", form, stdin=data).out == f'{{"enqueued":{len(payloads)},"duplicates":0}}\n'
    assert [job["payload"] for job in jobs.claim("-n", "9")] == payloads


def test_envelopes_say_everything(jobs: Queue) -> None:
    """What a line says counts, and the options for the lines that do not say."""
    line = {
        "payload": {"n": 1},
        "queue": "mail",
        "priority": -7,
        "run_at": "2026-01-01T09:00:00+09:00",
        "max_attempts": 2,
        "dedupe_key": "a",
    }
    data = json.dumps(line) + '\n{"payload": 2, "queue": null}\n'
    jobs.ok("enqueue", "--jsonl", "--queue", "other", "--priority", "3", "--max-attempts", "9", stdin=data)
    rows = jobs.sql(
        "SELECT queue, priority, extract(epoch FROM run_at), max_attempts, dedupe_key FROM {jobs} ORDER BY id"
    )
    assert rows == [("mail", -7, 1767225600, 2, "a"), ("other", 3, None, 9, None)]


def test_chunks_stand_and_say_where_to_resume(jobs: Queue) -> None:
    """With `--chunk`, what was committed before a bad line stays; without, nothing is enqueued."""
    data = "".join(f'{{"n": {n}}}\n' for n in range(25)) + "oops\n"
    whole = jobs("enqueue", "--lines", stdin=data)
    assert (whole.code, jobs.statuses()) == (64, {})
    assert "line 26: not JSON" in whole.err
    parts = jobs("enqueue", "--lines", "--chunk", "10", stdin=data)
    assert (parts.code, parts.lines) == (64, [{"enqueued": 20, "duplicates": 0}])
    assert "line 26: not JSON" in parts.err
    assert "; lines 1 to 20 are dealt with; resume at line 21 (tail -n +21)" in parts.err
    assert jobs.statuses() == {"pending": 20}
    rest = "".join(data.splitlines(keepends=True)[20:25])
    jobs.ok("enqueue", "--lines", "--chunk", "10", stdin=rest)
    assert sorted(job["payload"]["n"] for job in jobs.claim("-n", "99")) == list(range(25))


def test_list_show_and_stats(jobs: Queue) -> None:
    """What runs comes first, then what has failed, then what is pending; counts are by queue."""
    jobs.put("first", "second", "third", queue="mail")
    jobs.ok("enqueue", "--queue", "mail", "--in", "1h", "1")
    failed, running = jobs.claim("-n", "2", "--queue", "mail")
    jobs.end("fail", failed, retry=False, error="Traceback:\nValueError: no")
    listed = jobs.ok("list", "--json").lines
    assert [job["status"] for job in listed] == ["running", "failed", "pending", "pending"]
    assert list(listed[0]) == [
        "id", "queue", "status", "priority", "attempts", "max_attempts", "created_at", "run_at", "claimed_until",
        "claimed_by", "finished_at", "exit_code", "reason", "last_error", "dedupe_key",
    ]  # fmt: skip
    assert [job["id"] for job in jobs.ok("list", "--status", "running", "--json").lines] == [running["id"]]
    assert jobs.ok("list", "--queue", "none", "--json").out == ""
    text = jobs.ok("list").out
    assert re.search(rf"^{failed['id']} +mail +failed .*no retry, ValueError: no$", text, re.MULTILINE)
    assert text.startswith(f'# jobs in "{jobs.schema}" of ')
    shown = jobs.ok("show", str(failed["id"])).out
    assert re.search(r"^last_error +Traceback:\n +ValueError: no$", shown, re.MULTILINE)
    assert re.search(r'^payload +"first"$', shown, re.MULTILINE)
    assert jobs.ok("show", str(failed["id"]), "--json").lines[0]["payload"] == "first"
    assert jobs("show", "999").code == 1
    [counts] = jobs.ok("stats", "--json").lines
    age = counts.pop("oldest_ready_s")
    assert 0 <= age < 60
    assert counts == {
        "queue": "mail", "ready": 1, "delayed": 1, "running": 1, "expired": 0, "failed": 1, "done_estimate": 0,
    }  # fmt: skip
    jobs.expire()
    assert jobs.ok("stats", "--queue", "mail", "--json").lines[0]["expired"] == 1
    assert jobs.ok("stats", "--queue", "new", "--json").lines[0]["ready"] == 0
    assert "mail" in jobs.ok("stats").out


def test_wait(jobs: Queue) -> None:
    """Done is 0, failed 1, not yet 124, and unknown is no answer."""
    jobs.put(1, 2)
    one, two = jobs.claim("-n", "2")
    late = jobs("wait", str(one["id"]), str(two["id"]), "--wait", "0.3")
    assert late.code == 124
    assert f"jobs {one['id']}, {two['id']}" in late.err
    jobs.end("complete", one)
    assert jobs("wait", str(one["id"])).code == 0
    jobs.end("fail", two, retry=False)
    assert jobs("wait", str(one["id"]), str(two["id"])).code == 1
    jobs.put(3)
    mixed = jobs("wait", str(two["id"]), "3", "--wait", "0.2")
    assert mixed.code == 124
    assert f"for job 3, not finished yet; job {two['id']} failed; exit 124" in mixed.err
    assert jobs("wait", "4711", "3").code == 69
    unknown = jobs("wait", "4711")
    assert unknown.code == 69
    assert "there is no job 4711" in unknown.err


def test_retry(jobs: Queue) -> None:
    """Failed jobs begin anew; cancelled ones only by their ids; a dedupe key in use again holds back its own job alone."""
    lines = "".join(json.dumps({"payload": n, "dedupe_key": f"k{n}"}) + "\n" for n in range(4))
    jobs.ok("enqueue", "--jsonl", stdin=lines)
    claimed = jobs.claim("-n", "4")
    jobs.end("fail", *claimed[:3], retry=False)
    jobs.ok("cancel", str(claimed[3]["id"]))
    jobs.ok("enqueue", '"new"', "--dedupe-key", "k1")
    assert jobs.ok("retry", "--all-queues").lines == [{"retried": 2, "duplicates": 1}]
    again = {job["payload"]: job for job in jobs.claim("-n", "9")}
    assert again.keys() == {0, 2, "new"}
    assert again[0]["attempt"] == 1
    named = jobs("retry", *(str(job["id"]) for job in claimed), "4711")
    assert named.code == 1
    assert [line["result"] for line in named.lines] == ["not failed", "duplicate", "not failed", "retried", "unknown"]
    jobs.end("fail", *again.values(), retry=False)
    assert jobs.ok("retry", "--queue", "default").lines == [{"retried": 3, "duplicates": 1}]
    assert jobs.ok("retry", "--all").lines == [{"retried": 0, "duplicates": 1}]


def test_cancel(jobs: Queue) -> None:
    """A cancelled job has failed; who runs it has lost it; a whole queue can be cancelled."""
    jobs.put(1, 2, 3, 4, 5)
    jobs.ok("enqueue", "--in", "1h", "6")
    running, done = jobs.claim("-n", "2")
    jobs.end("complete", done)
    cancelled = jobs("cancel", str(running["id"]), str(done["id"]), "4711")
    assert cancelled.code == 1
    assert [line["result"] for line in cancelled.lines] == ["cancelled", "not open", "unknown"]
    assert jobs.end("complete", running).code == 76
    assert jobs.ok("cancel", "--queue", "default").lines == [{"cancelled": 4}]
    assert jobs.statuses() == {"failed": 5, "done": 1}
    assert jobs("claim").code == 3


def test_purge(jobs: Queue) -> None:
    """Old done jobs are deleted in batches; failed ones only when asked for."""
    jobs.sql(
        "INSERT INTO {jobs} (payload, status, finished_at) SELECT '1', 'done', now() - interval '2 days' FROM generate_series(1, 5100)"
    )
    jobs.put(1, 2)
    one, two = jobs.claim("-n", "2")
    jobs.end("complete", one)
    jobs.end("fail", two, retry=False)
    forgotten = jobs("purge", "--older-than", "30")
    assert forgotten.code == 64
    assert "30 of what? Write 30d for days" in forgotten.err
    assert jobs.ok("purge", "--older-than", "1d").lines == [{"purged": 5100}]
    assert jobs.statuses() == {"done": 1, "failed": 1}
    assert jobs.ok("purge", "--older-than", "0").lines == [{"purged": 1}]
    assert jobs.ok("purge", "--older-than", "0s", "--failed").lines == [{"purged": 1}]


def test_a_payload_that_is_too_large_holds_up_nobody(jobs: Queue) -> None:
    """Put in by a plain INSERT, it makes its job fail for good; the jobs beside it are claimed with their payloads."""
    jobs.put("before")
    jobs.sql("INSERT INTO {jobs} (payload) SELECT to_jsonb(repeat('x', 2 * 1024 * 1024))")
    jobs.put("after")
    assert [job["payload"] for job in jobs.claim("-n", "9")] == ["before", "after"]
    [large] = jobs.ok("list", "--status", "failed", "--json").lines
    assert large["reason"] == "payload"
    assert "larger than max_payload, 1048576 bytes" in large["last_error"]
    assert jobs.statuses() == {"running": 2, "failed": 1}


@pytest.mark.slow
def test_a_payload_that_cannot_be_printed_holds_up_nobody(plain_jobs: Queue) -> None:
    """The same with 2.5 kB that the server cannot turn into text: every claim would fail for ever."""
    jobs = plain_jobs
    jobs.put("before")
    jobs.sql("INSERT INTO {jobs} (payload) SELECT jsonb_agg(1e131071::numeric) FROM generate_series(1, 9000)")
    jobs.put("after")
    assert [job["payload"] for job in jobs.claim("-n", "9")] == ["before", "after"]
    [unprintable] = jobs.ok("list", "--status", "failed", "--json").lines
    assert unprintable["reason"] == "payload"
    assert "cannot print the payload (5" in unprintable["last_error"]
    assert "the server cannot print it" in jobs.ok("show", str(unprintable["id"])).out


def test_claim_waits(jobs: Queue) -> None:
    """`--wait` gives up after its time; a job that comes due meanwhile is claimed."""
    assert jobs("claim", "--wait", "0.3").code == 3
    jobs.ok("enqueue", "1", "--in", "0.5s")
    assert len(jobs.claim("--wait", "20")) == 1


def test_time_limits_of_the_role_do_not_count(jobs: Queue) -> None:
    """A statement that waits for a lock longer than the role's statement_timeout is carried out all the same."""
    jobs.put(1)
    with jobs.server.connect() as other, other.transaction():
        other.execute(f"LOCK TABLE {jobs.table} IN SHARE ROW EXCLUSIVE MODE")
        done: list[Done] = []
        thread = threading.Thread(target=lambda: done.append(jobs("claim")))
        thread.start()
        until(
            lambda: jobs.sql(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'relation' AND now() - query_start > interval '1.2 s'"
            )
        )
    thread.join()
    assert (done[0].code, len(done[0].lines), done[0].err) == (0, 1, "")


@pytest.mark.parametrize("argv", [("claim",), ("enqueue", "--lines"), ("stats",), ("migrate",)])
def test_a_poolers_session_is_left_as_it_was(argv: tuple[str, ...], jobs: Queue) -> None:
    """What is set is set for our own session or for one transaction: the next client of a pooler finds nothing of it."""
    names = ("lock_timeout", "statement_timeout", "default_transaction_isolation", "default_transaction_read_only")
    shown = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
    with psycopg.connect(jobs.server.dsn, options="", autocommit=True) as direct:
        defaults = direct.execute(shown).fetchone()
    with psycopg.connect(jobs.dsn, autocommit=True) as client:
        jobs(*argv, stdin="1\n")
        assert client.execute(shown).fetchone() == defaults


def test_what_others_put_in_is_shown_as_one_harmless_line(plain_jobs: Queue) -> None:
    """Control characters of error texts, times beyond Python's calendar, names that are no text."""
    jobs = plain_jobs
    jobs.sql("INSERT INTO {jobs} (payload, dedupe_key) VALUES ('1', E'k\\e]0;x\\x07\\n')")
    jobs.sql(
        "INSERT INTO {jobs} (payload, run_at) VALUES ('1', '9999-12-31T23:59:59Z'), ('1', '20000-01-01T00:00:00Z')"
    )
    jobs.sql("UPDATE {jobs} SET last_error = E'\\e[2J', reason = 'exit' WHERE id = 1")
    for argv in (("list",), ("show", "1"), ("show", "2"), ("show", "3")):
        for zone in ("Asia/Tokyo", "America/New_York"):
            assert "\x1b" not in jobs.ok(*argv, TZ=zone).out
    with pytest.raises(psycopg.errors.CheckViolation):
        jobs.sql("INSERT INTO {jobs} (payload, queue) VALUES ('1', E'a\\nb')")
    for verb in ("list", "stats", "cancel", "retry", "claim"):
        assert jobs(verb, "--queue", "\udcff").code == 64
    assert jobs("show", "0" * 19 + "9" * 5000).code == 64


def test_json_is_utf8_on_every_terminal(plain_jobs: Queue) -> None:
    """What is JSON stays JSON, whatever the encoding of stdout."""
    plain_jobs.put("caf\u00e9 \U0001f600")
    assert (
        plain_jobs.ok("show", "1", "--json", PYTHONIOENCODING="latin-1").lines[0]["payload"] == "caf\u00e9 \U0001f600"
    )


def test_deep_payloads_do_not_stop_others(plain_jobs: Queue) -> None:
    """A payload deeper than Python reads is given out like any other, and its line can be fed back."""
    plain_jobs.sql("INSERT INTO {jobs} (payload) VALUES ((repeat('[', 2000) || repeat(']', 2000))::jsonb)")
    plain_jobs.put(2)
    lines = plain_jobs.ok("claim", "-n", "2").out
    assert [line["result"] for line in plain_jobs.ok("complete", "--stdin", stdin=lines).lines] == ["done", "done"]


def test_nothing_to_claim_is_said_to_who_asks(plain_jobs: Queue) -> None:
    """With -v; a queue's name may be mistyped."""
    done = plain_jobs("claim", "-v", "--queue", "mial")
    assert done.code == 3
    assert "nothing to claim now in queue mial" in done.err
