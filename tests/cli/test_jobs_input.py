"""What comes in: refused whole with its line, or kept to the digit; by roles that may do no more than that."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psycopg
import pytest

from batchguard.core.errors import UsageError
from batchguard.core.payload import verify_payload
from tests.core.test_payload import GOOD, REFUSED
from tests.fixtures.guard import COMMAND, StartRun, clean_environment
from tests.fixtures.queue import ForkServer, Queue
from tests.fixtures.server import Server
from tests.fixtures.waiting import until

PRINTED = {
    "-0": "0",
    "1e3": "1000",
    "1e999": "1" + "0" * 999,
    " { } ": "{}",
    '"\U0001f600 \\ud83d\\ude00 移行"': '"\U0001f600 \U0001f600 移行"',
}
"""What jsonb writes otherwise than it was written."""


@pytest.mark.parametrize("form", ["--lines", "--jsonl", "argument", "-"])
def test_payloads_come_out_as_they_went_in(form: str, plain_jobs: Queue) -> None:
    """Numbers to the digit, emoji, quotes, newlines, top-level scalars, 1 MiB strings."""
    texts = [text for text in GOOD if len(text) < 100_000 or form in ("--lines", "-")]
    if form == "--lines":
        plain_jobs.ok("enqueue", form, stdin="\n".join(texts))
    elif form == "--jsonl":
        plain_jobs.ok("enqueue", form, stdin="".join(f'{{"payload":{text}}}\n' for text in texts))
    else:
        for text in texts:
            plain_jobs.ok("enqueue", *(("--", text) if form == "argument" else ("-",)), stdin=text)
    lines = plain_jobs.ok("claim", "-n", "99").out.splitlines()
    assert [line.partition(', "payload": ')[2][:-1] for line in lines] == [PRINTED.get(text, text) for text in texts]


def test_sizes_are_those_of_the_server(plain_jobs: Queue) -> None:
    """What a payload is reckoned to take is what the server prints, to the byte."""
    texts = [*GOOD, '{"a":{"b":[1,-2.50,{"c":null,"d":false,"":"\\u001f\\n\\/\x7f"}]},"e":true}', "[1e-7,-1.5e2,0.0]"]
    for text in texts:
        [[size]] = plain_jobs.sql("SELECT octet_length((%s::jsonb)::text)", text)
        exact = size + (text == "-0")  # jsonb has no negative zero
        verify_payload(text, max(1, exact - 2))
        if exact > 3:
            with pytest.raises(UsageError, match=f"has {exact} bytes"):
                verify_payload(text, exact - 3)


@pytest.mark.parametrize("text", [text for text in REFUSED if text.strip() and len(text) < 100_000])
def test_one_bad_payload_refuses_all(text: str, plain_jobs: Queue) -> None:
    """Nothing is enqueued from a file with a bad line, and the line is named."""
    for form, line in (("--lines", text), ("--jsonl", f'{{"payload":{text}}}')):
        done = plain_jobs("enqueue", form, stdin=f'{{"payload":1}}\n{line}\n{{"payload":3}}\n')
        assert (done.code, done.out) == (64, "")
        assert done.err.startswith("batchguard: line 2: ")
        assert done.err.count("\n") == 1
    assert plain_jobs.statuses() == {}


@pytest.mark.parametrize(
    ("form", "data", "why"),
    [
        ("--lines", b"\xef\xbb\xbf1\n", "line 1: it begins with a byte order mark"),
        ("--lines", b"1\n\n2\n", "line 2: it is empty"),
        ("--text", b"a\n\nb\n", "line 2: it is empty"),
        ("--lines", b'1\n"' + b"x" * 7 * 1024**2 + b'"\n', "line 2: it has more than"),
        ("--null", b"a\0" + b"x" * 7 * 1024**2, "item 2: it has more than"),
        ("-", b'"' + b"x" * 7 * 1024**2, "which no payload has"),
        ("--text", b"a\n\xff\n", "line 2: byte 1 is not UTF-8 (0xff)"),
        ("--text", b"a\nb\0\n", "line 2: the text has a NUL in it"),
        ("--null", b"a\0\0b", "item 2: it is empty"),
        ("--jsonl", b'{"payload": 1}\r\n{"payload": 2, "run_at": "tomorrow"}\n', "line 2: run_at: "),
        ("-", b"1\n2\n", "not JSON: extra data"),
        ("-", b"\xef\xbb\xbf1", "byte order mark"),
        ("-", b"", "stdin is empty"),
    ],
)
def test_input_that_is_refused(form: str, data: bytes, why: str, plain_jobs: Queue) -> None:
    """Bytes that are no lines of ours."""
    done = plain_jobs("enqueue", form, stdin=data)
    assert done.code == 64
    assert why in done.err
    assert plain_jobs.statuses() == {}


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ((), "what is to be enqueued?"),
        (("hello",), "PAYLOAD hello: not JSON"),
        (("1", "--lines"), "--lines and PAYLOAD: give one of them"),
        (("--jsonl", "--text"), "give one of them"),
        (("--lines", "--dedupe-key", "a"), "--dedupe-key would be the same for all lines"),
        (("1", "--chunk", "5"), "--chunk is for many jobs"),
        (("1", "--in", "5", "--run-at", "2026-01-01T00:00:00Z"), "give one of them"),
        (("1", "--run-at", "06:00"), "--run-at: "),
        (("1", "--priority", "99999"), "--priority: 99999 is not a priority"),
        (("1", "--queue", ""), "--queue: '' is not the name of a queue"),
        (("1", "--max-attempts", "0"), "--max-attempts: 0 is not"),
        (("1", "--schema", "pg_catalog"), "--schema: "),
        (("1", "--dedupe-key", "\udcff"), "--dedupe-key: "),
        (('"\udcff"',), "is not UTF-8"),
        (("1", "--queue", "\udcff"), "--queue: "),
    ],
)
def test_usage(argv: tuple[str, ...], why: str, plain_jobs: Queue) -> None:
    """A command line that makes no sense is refused in a line, before anything is asked."""
    done = plain_jobs("enqueue", *argv, dsn="host=nowhere.invalid")
    assert done.code == 64
    assert why in done.err
    assert done.err.count("\n") == 1


def test_role_that_may_only_insert(plain_jobs: Queue, jobs_role: str) -> None:
    """It puts jobs in, by psql in its own transaction and by every form; it may not look, claim or purge."""
    with psycopg.connect(jobs_role) as connection:
        connection.execute(f"INSERT INTO {plain_jobs.table} (payload) VALUES ('{{\"n\": 1}}')")
        assert plain_jobs.statuses() == {}
    one = plain_jobs("enqueue", '{"n": 2}', dsn=jobs_role)
    assert (one.code, one.out) == (0, "")
    assert "GRANT SELECT (id)" in one.err
    plain_jobs.ok("enqueue", "--lines", stdin="3\n4\n", dsn=jobs_role)
    plain_jobs.ok("enqueue", "--jsonl", stdin='{"payload": 5, "dedupe_key": "k"}\n' * 2, dsn=jobs_role)
    assert plain_jobs.statuses() == {"pending": 5}
    for argv in (("claim",), ("stats",), ("list",), ("purge", "--older-than", "0"), ("reap",), ("show", "1")):
        refused = plain_jobs(*argv, dsn=jobs_role)
        assert refused.code == 77, argv
        assert "42501" in refused.err
        assert "Ask its owner; batchguard jobs migrate --help lists the rights" in refused.err


def test_closed_pipe_releases_what_was_not_written(plain_jobs: Queue, tmp_path: Path) -> None:
    """The reader takes one line and goes: what does not fit into the pipe is released, no attempt used."""
    plain_jobs.put(*["x" * 1000] * 400)
    argv = [*COMMAND, "jobs", "claim", "--schema", plain_jobs.schema, "-n", "400"]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment(BATCHGUARD_DSN=plain_jobs.dsn)
    ) as claim:
        assert claim.stdout is not None
        first = json.loads(claim.stdout.readline())
        claim.stdout.close()
        assert claim.wait(20) == 128 + signal.SIGPIPE
    statuses = plain_jobs.statuses()
    assert statuses["pending"] + statuses["running"] == 400
    assert 1 <= statuses["running"] < 300
    assert plain_jobs.sql("SELECT status FROM {jobs} WHERE id = %s", first["id"]) == [("running",)]
    assert plain_jobs.sql("SELECT DISTINCT attempts FROM {jobs} WHERE status = 'pending'") == [(0,)]


def test_full_disk_releases_what_was_not_written(plain_jobs: Queue, start: StartRun) -> None:
    """Jobs that cannot be written are released, and the command says so; with stdout closed nothing is claimed."""
    plain_jobs.put(1, 2, 3)
    with open("/dev/full", "wb") as full:
        run = start("jobs", "claim", "--schema", plain_jobs.schema, "-n", "3", stdout=full)
        assert run.code() == 69
    assert "cannot write the jobs (No space left on device): 3 of 3 released" in run.err
    assert plain_jobs.statuses() == {"pending": 3}
    script = f"exec {' '.join(COMMAND)} jobs claim --schema {plain_jobs.schema} >&-"
    done = subprocess.run(["sh", "-c", script], env=clean_environment(BATCHGUARD_DSN=plain_jobs.dsn), check=False)
    assert done.returncode == 64
    assert plain_jobs.statuses() == {"pending": 3}


def test_interrupted_while_nobody_reads(plain_jobs: Queue) -> None:
    """Ctrl-C while the reader sleeps: what is not in the pipe yet is released."""
    plain_jobs.put(*["x" * 1000] * 200)
    argv = [*COMMAND, "jobs", "claim", "--schema", plain_jobs.schema, "-n", "200"]
    reading, writing = os.pipe()
    with subprocess.Popen(argv, stdout=writing, env=clean_environment(BATCHGUARD_DSN=plain_jobs.dsn)) as claim:
        os.close(writing)
        until(lambda: plain_jobs.statuses().get("running") == 200)
        until(lambda: _state(claim.pid) == "S")
        claim.send_signal(signal.SIGINT)
        assert claim.wait(20) == 128 + signal.SIGINT
    os.close(reading)
    assert plain_jobs.statuses()["pending"] > 100


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_letters_that_the_database_does_not_have(server: Server, forkserver: ForkServer) -> None:
    """They are refused on the way in; in an error text they are escaped, so that the job can fail at all."""
    server.sql("CREATE DATABASE euc ENCODING 'EUC_JP' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    try:
        euc = Server(f"{server.dsn} dbname=euc")
        jobs = Queue(euc, euc.dsn, "batchguard", forkserver)
        jobs.ok("migrate")
        for argv, lines in ((("enqueue", '"😀"'), ""), (("enqueue", "--lines"), '"移"\n"😀"\n')):
            refused = jobs(*argv, stdin=lines)
            assert refused.code == 64
            assert "the server does not take it (22P05" in refused.err
        jobs.ok("enqueue", '"移行"')
        [job] = jobs.claim()
        assert job["payload"] == "移行"
        assert jobs.end("fail", job, error="失敗 😀").lines[0]["result"] == "retrying"
        assert jobs.sql("SELECT last_error FROM {jobs}") == [("\\u5931\\u6557 \\U0001f600",)]
    finally:
        server.sql("DROP DATABASE euc WITH (FORCE)")


@pytest.mark.parametrize(
    "grant",
    ["", "GRANT SELECT (id) ON {jobs} TO {role}", "GRANT SELECT (id, queue, dedupe_key, status) ON {jobs} TO {role}"],
)
def test_duplicates_of_a_role_with_few_rights(grant: str, plain_jobs: Queue, jobs_role: str, role: str) -> None:
    """Whatever it may read: a duplicate is said to be one, and is an error where that was asked for."""
    if grant:
        plain_jobs.sql(grant.replace("{role}", role))
    first = plain_jobs("enqueue", "1", "--dedupe-key", "k", dsn=jobs_role)
    assert first.code == 0
    again = plain_jobs("enqueue", "1", "--dedupe-key", "k", dsn=jobs_role)
    assert again.code == 0
    assert again.out == (first.out if "queue" in grant else "")
    if not again.out:
        assert "dedupe key 'k' is in use: nothing was enqueued" in again.err
    refused = plain_jobs("enqueue", "1", "--dedupe-key", "k", "--fail-on-duplicate", dsn=jobs_role)
    assert (refused.code, refused.out) == (5, "")
    assert plain_jobs.statuses() == {"pending": 1}


def test_rules_of_somebody_elses_that_keep_a_job_out(plain_jobs: Queue) -> None:
    """A unique index on the payload, or a trigger that drops the row: it is said, and not tried for ever."""
    plain_jobs.sql("CREATE UNIQUE INDEX mine ON {jobs} ((payload->>'x'))")
    plain_jobs.ok("enqueue", '{"x": "1"}')
    for argv in (('{"x": "1"}',), ('{"x": "1"}', "--dedupe-key", "free")):
        done = plain_jobs("enqueue", *argv)
        assert done.code == 78
        assert "a trigger or a unique index of your own" in done.err


def test_an_id_that_cannot_be_written(plain_jobs: Queue, start: StartRun) -> None:
    """The job is in, and is not to be enqueued again: no failure, and a line that says so."""
    with open("/dev/full", "wb") as full:
        run = start("jobs", "enqueue", "--schema", plain_jobs.schema, "1", stdout=full)
        assert run.code() == 0
    assert "job 1 is enqueued, although that could not be written (No space left on device)" in run.err
    assert plain_jobs.statuses() == {"pending": 1}


def test_closed_stdin(plain_jobs: Queue) -> None:
    """A script that closes it is told so."""
    for argv in ("enqueue --lines", "enqueue -", "complete --stdin"):
        script = f"exec {' '.join(COMMAND)} jobs {argv} --schema {plain_jobs.schema} <&-"
        done = subprocess.run(
            ["sh", "-c", script], env=clean_environment(BATCHGUARD_DSN=plain_jobs.dsn), check=False, capture_output=True
        )
        assert (done.returncode, done.stderr) == (64, b"batchguard: stdin is closed\n")


def test_bytes_that_are_no_utf8_hold_up_nobody(server: Server, forkserver: ForkServer) -> None:
    """In a database without an encoding a plain INSERT can put them in: that job fails, the others are claimed."""
    server.sql("CREATE DATABASE ascii ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    try:
        database = Server(f"{server.dsn} dbname=ascii client_encoding=SQL_ASCII")
        jobs = Queue(database, f"{server.dsn} dbname=ascii", "batchguard", forkserver)
        jobs.ok("migrate")
        jobs.sql("""INSERT INTO {jobs} (payload) VALUES (E'"caf\\xe9"'::text::jsonb)""")
        jobs.sql("INSERT INTO {jobs} (payload, dedupe_key) VALUES ('1', E'caf\\xe9')")
        jobs.put("good", dedupe_key="k")
        [job] = jobs.claim("-n", "9")
        assert (job["payload"], job["dedupe_key"]) == ("good", "k")
        assert jobs.sql("SELECT count(*) FROM {jobs} WHERE status = 'failed'") == [(2,)]
    finally:
        server.sql("DROP DATABASE ascii WITH (FORCE)")
