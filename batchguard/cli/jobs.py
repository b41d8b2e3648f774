"""`batchguard jobs`: a queue in one table; here jobs come in, are claimed, and end."""

import errno
import json
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from batchguard.cli import upkeep
from batchguard.cli.listing import print_lines
from batchguard.cli.options import JobCall, of_queue, read_option
from batchguard.core.errors import BatchguardError, UsageError
from batchguard.core.exit_codes import ExitCode, exit_code_of_signal

if TYPE_CHECKING:
    from typing import BinaryIO

    from batchguard.core.envelope import NewJob
    from batchguard.core.job import Claim, Ending, Verb
    from batchguard.runtime.enqueue import Chunks, Enqueued, Form

jobs = typer.Typer(
    name="jobs",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A queue in one PostgreSQL table, for cron batches and shell scripts. A job is given out at least once: a "
    "worker that dies after its mail went out and before it said so is followed by another. The idempotency key is "
    "the same each time; use it.",
    epilog="Settings in [jobs] of the config file: schema, queue, lease, max_attempts, backoff, backoff_max, "
    "max_payload.",
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    jobs.command(epilog=MIGRATE_EPILOG)(migrate)
    jobs.command(epilog=ENQUEUE_EPILOG)(enqueue)
    jobs.command(epilog=CLAIM_EPILOG)(claim)
    jobs.command(epilog=COMPLETE_EPILOG)(complete)
    jobs.command(epilog=FAIL_EPILOG)(fail)
    jobs.command(epilog=RELEASE_EPILOG)(release)
    jobs.command(epilog=EXTEND_EPILOG)(extend)
    upkeep.register(jobs)
    app.add_typer(jobs)


MIGRATE_EPILOG = """Examples:

\b
  batchguard jobs migrate
  batchguard jobs migrate --dump-sql | psql "$DSN"      (as a role that may create a schema)

A second time changes nothing, and any number of hosts may do it at once. Those who only enqueue need
GRANT USAGE ON SCHEMA, and INSERT on (payload, queue, priority, run_at, max_attempts, dedupe_key); with SELECT on
(id, queue, dedupe_key, status) they are told the ids. Workers need SELECT and UPDATE on the table, purge DELETE too.

Exit codes: 0; 69 database unreachable; 77 login or right missing; 78 config, standby, newer schema."""


@of_queue
def migrate(
    call: JobCall,
    dump_sql: Annotated[
        bool, typer.Option("--dump-sql", help="Print the SQL for psql instead; no server is asked.")
    ] = False,
) -> int:
    """Make the queue's table, or bring it up to date."""
    from batchguard.adapters import report
    from batchguard.runtime import migrate as work

    if dump_sql:
        typer.echo(work.dump_sql(call.settings))
        return ExitCode.OK
    before, after = work.migrate(call.dsn, call.settings)
    if call.verbose or report.is_terminal():
        what = "is up to date" if before == after else "was made" if not before else f"came from version {before}"
        report.say(f'the queue in schema "{call.settings.schema}" {what}: version {after}')
    return ExitCode.OK


ENQUEUE_EPILOG = """Examples:

\b
  batchguard jobs enqueue '{"to": "a@example.org"}' --queue mail
  batchguard jobs enqueue --dedupe-key report-2026-12 --in 10m '{"month": "2026-12"}'
  batchguard jobs enqueue --jsonl < jobs.jsonl          ({"payload": …, "queue": "mail", "priority": -5} a line)
  find /in -name '*.csv' -print0 | batchguard jobs enqueue --null

An INSERT INTO batchguard.jobs (payload) VALUES (…) in your own transaction is as good. Input is UTF-8, checked to the
end before anything is sent: all of it is enqueued, or nothing; with --chunk, all up to the first error. Numbers keep
all their digits. A line of --jsonl may have payload, queue, priority, run_at, max_attempts and dedupe_key; the options
are for the lines that do not say. One job prints its id (that of the job that has its dedupe key already, if there is
one); many print {"enqueued":N,"duplicates":M}. A dedupe key is free again when its job is done or has failed. What a
payload may have is max_payload in [jobs] of the config file, 1MiB unless said. Write -- before a number below 0.

Exit codes: 0; 5 --fail-on-duplicate met one, and nothing is enqueued; 64 usage, or what is wrong in which line;
69 database unreachable; 77 login or right missing; 78 config, standby, no queue yet."""


@of_queue
def enqueue(
    call: JobCall,
    payload: Annotated[
        str | None,
        typer.Argument(metavar="[PAYLOAD|-]", help="One JSON value, or - for one on stdin.", show_default=False),
    ] = None,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Stdin has an envelope a line: an object with payload.")
    ] = False,
    lines: Annotated[bool, typer.Option("--lines", help="Stdin has a payload a line, as JSON.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Stdin has a text a line; each becomes a JSON string.")] = False,
    null: Annotated[
        bool, typer.Option("--null", help="The same with a NUL after each, as find -print0 writes.")
    ] = False,
    queue: Annotated[
        str | None, typer.Option(metavar="Q", help="The queue.  [default: queue in [jobs], else default]")
    ] = None,
    priority: Annotated[int, typer.Option(metavar="N", help="Lower comes first, as with nice(1).")] = 0,
    run_at: Annotated[str | None, typer.Option(metavar="TIME", help="Not before: 2026-12-24T06:00:00+09:00.")] = None,
    in_: Annotated[str | None, typer.Option("--in", metavar="D", help="Not before so long from now.")] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="How often it is tried; the first run counts.  [default: max_attempts in [jobs], else 5]"
        ),
    ] = None,
    dedupe_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="At most one pending or running job of the queue has it.")
    ] = None,
    fail_on_duplicate: Annotated[
        bool, typer.Option("--fail-on-duplicate", help="Exit 5 and enqueue nothing when a dedupe key is in use.")
    ] = False,
    chunk: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Commit every N lines; after an error, say where to resume.")
    ] = None,
) -> int:
    """Put jobs in: one from the command line, or many from stdin."""
    from batchguard.runtime import enqueue as work

    form = _form(payload, jsonl=jsonl, lines=lines, text=text, null=null)
    if form is not None and dedupe_key is not None:
        raise UsageError("--dedupe-key would be the same for all lines; use --jsonl, where each may have its own")
    if form is None and chunk is not None:
        raise UsageError("--chunk is for many jobs from stdin: --jsonl, --lines, --text or --null")
    defaults = _defaults(call, queue, priority, run_at, in_, max_attempts, dedupe_key)
    max_payload = call.settings.max_payload
    if form is None:
        job = (
            work.read_value(_stdin(), defaults, max_payload)
            if payload == "-"
            else work.read_argument(payload or "", defaults, max_payload)
        )
        return _enqueue_one(call, job, fail_on_duplicate=fail_on_duplicate)
    source = work.read_jobs(_stdin(), form, defaults, max_payload)
    if chunk is None:
        done = work.enqueue_all(call.dsn, call.settings, source, fail_on_duplicate=fail_on_duplicate)
        return _say_enqueued(done, fail_on_duplicate=fail_on_duplicate)
    return _enqueue_chunks(
        work.Chunks(call.dsn, call.settings, chunk, fail_on_duplicate=fail_on_duplicate), source, work.unit(form)
    )


def _enqueue_chunks(chunks: "Chunks", source: "Iterable[NewJob]", unit: str) -> int:
    """Put in chunks, and say in the end, whatever it is, what is in and where to resume."""
    from batchguard.adapters import report

    def place() -> str:
        done = chunks.dealt_with
        tail = f" (tail -n +{done + 1})" if unit == "line" else ""
        return (
            f"{unit}s 1 to {done} are dealt with; resume at {unit} {done + 1}{tail}" if done else "nothing is enqueued"
        )

    try:
        chunks.put(source)
    except BatchguardError as error:
        _say_enqueued(chunks.total, fail_on_duplicate=False)
        raise type(error)(f"{str(error).rstrip('.')}; {place()}") from None
    except KeyboardInterrupt:
        _say_enqueued(chunks.total, fail_on_duplicate=False)
        report.say(f"interrupted; {place()}")
        raise
    code = _say_enqueued(chunks.total, fail_on_duplicate=chunks.fail_on_duplicate)
    if code != ExitCode.OK:
        report.say(f"a dedupe key is in use; {place()}")
    return code


def _stdin() -> "BinaryIO":
    if sys.stdin is None:
        raise UsageError("stdin is closed")
    return sys.stdin.buffer


def _form(payload: str | None, **wanted: bool) -> "Form | None":
    forms: list[Form] = [name for name, is_wanted in wanted.items() if is_wanted]  # type: ignore[misc]  # their names
    given = [f"--{name}" for name in forms] + ([] if payload is None else ["PAYLOAD"])
    if not given:
        raise UsageError("what is to be enqueued? Give a PAYLOAD, - for stdin, or --jsonl, --lines, --text, --null")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one of them")
    return forms[0] if forms else None


def _defaults(
    call: JobCall,
    queue: str | None,
    priority: int,
    run_at: str | None,
    in_: str | None,
    max_attempts: int | None,
    dedupe_key: str | None,
) -> "NewJob":
    from batchguard.core.durations import parse_duration
    from batchguard.core.envelope import NewJob, read_run_at
    from batchguard.core.job_settings import read_dedupe_key, read_max_attempts, read_priority, read_queue

    if run_at is not None and in_ is not None:
        raise UsageError("--run-at and --in both say when; give one of them")
    at = read_option("--run-at", run_at, read_run_at)
    in_s = read_option("--in", in_, parse_duration)
    job = NewJob(
        payload="",
        queue=read_option("--queue", queue, read_queue) or call.settings.queue,
        priority=read_option("--priority", priority, read_priority) or 0,
        run_at=at,
        max_attempts=read_option("--max-attempts", max_attempts, read_max_attempts) or call.settings.max_attempts,
        dedupe_key=read_option("--dedupe-key", dedupe_key, read_dedupe_key),
    )
    if in_s is None:
        return job
    from batchguard.runtime.enqueue import moment_from_now

    return replace(job, run_at=moment_from_now(call.dsn, call.settings, in_s))


def _enqueue_one(call: JobCall, job: "NewJob", *, fail_on_duplicate: bool) -> int:
    from batchguard.adapters import report
    from batchguard.runtime.enqueue import enqueue_one

    done = enqueue_one(call.dsn, call.settings, job)
    if done.is_duplicate:
        by = "" if done.id is None else f" by job {done.id}"
        message = f"dedupe key {job.dedupe_key!r} is in use{by}: nothing was enqueued"
        if fail_on_duplicate:
            report.say(f"{message}, exit 5")
            return ExitCode.DUPLICATE
        if done.id is None or call.verbose or report.is_terminal():
            report.say(message)
    elif done.id is None:
        report.say("enqueued; this role may not read ids (GRANT SELECT (id) would allow it)")
    if done.id is not None:
        _print_done(str(done.id), f"job {done.id} is enqueued")
    return ExitCode.OK


def _say_enqueued(done: "Enqueued", *, fail_on_duplicate: bool) -> int:
    counts = json.dumps({"enqueued": done.count, "duplicates": done.duplicates}, separators=(",", ":"))
    _print_done(counts, f"{done.count} jobs are enqueued")
    return ExitCode.DUPLICATE if fail_on_duplicate and done.duplicates else ExitCode.OK


def _print_done(line: str, done: str) -> None:
    """Print what came of something that is done, and would be done twice if it were taken for a failure."""
    from batchguard.adapters import report

    try:
        print_lines([line])
    except OSError as error:
        report.say(f"{done}, although that could not be written ({error.strerror})")


CLAIM_EPILOG = """Examples:

\b
  batchguard jobs claim --queue mail -n 10 --lease 5m > claimed.jsonl
  jq -r '.payload.to' claimed.jsonl | …
  batchguard jobs complete --stdin < claimed.jsonl

A claim prints a line of JSON for each job. The job is yours for the lease; who does not complete, fail, release or
extend it by then loses it to another worker. Several --queue are looked through in their order. The jobs that could
not be written, because the reader had gone or a signal came, are released; what is in the pipe already counts as
written.

Exit codes: 0; 3 nothing to claim now; 141 the reader had gone; 64 usage; 69 database unreachable; 77 login or right
missing; 78 config, standby, no queue yet."""

Queues = Annotated[
    list[str] | None,
    typer.Option(
        "--queue",
        metavar="Q",
        help="May be repeated, the first comes first.  [default: queue in [jobs], else default]",
    ),
]


@of_queue
def claim(
    call: JobCall,
    limit: Annotated[int, typer.Option("-n", "--limit", metavar="N", min=1, help="How many at most.")] = 1,
    queue: Queues = None,
    lease: Annotated[
        str | None, typer.Option(metavar="D", help="How long they are yours.  [default: lease in [jobs], else 60s]")
    ] = None,
    wait: Annotated[
        str | None, typer.Option("-w", "--wait", metavar="D", help="Wait for the first one so long, or forever.")
    ] = None,
) -> int:
    """Claim jobs: a line of JSON each, with the token that proves whose it is."""
    from batchguard.adapters import report
    from batchguard.core.job import read_lease
    from batchguard.core.job_settings import read_queue
    from batchguard.core.settings import read_setting
    from batchguard.runtime.claim import WriteError, claim_jobs

    wait_s = read_option("--wait", wait, lambda text: float(read_setting("wait", text))) or 0.0
    lease_s = read_option("--lease", lease, read_lease)
    names = [read_option("--queue", name, read_queue) or "" for name in queue or ()]
    _verify_stdout()
    queues = list(dict.fromkeys(names)) or [call.settings.queue]
    try:
        with claim_jobs(call.dsn, call.settings, queues, limit, lease_s or call.settings.lease, wait_s) as claimed:
            claimed.write_to(1)
    except WriteError as error:
        report.say(str(error))
        return exit_code_of_signal(signal.SIGPIPE) if error.number == errno.EPIPE else error.exit_code
    if claimed.jobs:
        return ExitCode.OK
    if call.verbose or report.is_terminal():
        report.say(f"nothing to claim now in queue {', '.join(queues)}; exit 3")
    return ExitCode.NOTHING_CLAIMABLE


def _verify_stdout() -> None:
    try:
        os.fstat(1)
    except OSError:
        raise UsageError("stdout is closed, and the jobs would be lost") from None


_ENDS = """

Each prints {"id": …, "result": …} for each job. Lines of --stdin need id and claim_token, so what claim printed will
do. It may be repeated: "already" means that it was done before, and is success.

Exit codes: 0; 64 usage; 69 database unreachable; 76 lost: the lease expired and the job was taken back or given to
another, it was cancelled, or the token is not of its claim; 77 login or right missing; 78 config, standby, no queue
yet."""

COMPLETE_EPILOG = f"""Examples:

\b
  batchguard jobs complete 17 6f1c0c1e-…
  batchguard jobs complete --stdin < claimed.jsonl

The result is done, already or lost.{_ENDS}"""

FAIL_EPILOG = f"""Examples:

\b
  batchguard jobs fail 17 6f1c0c1e-… --error "mailbox full" --retry-in 1h
  jq -c '{{id, claim_token, error: "no such user", retry: false}}' claimed.jsonl | batchguard jobs fail --stdin

The result is retrying, failed, already or lost. A line may have retry, retry_in, error and exit_code; the options are
for lines that do not say. After its last attempt a job has failed, whatever is said.{_ENDS}"""

RELEASE_EPILOG = f"""Examples:

\b
  batchguard jobs release --stdin < claimed.jsonl

The result is released, already or lost.{_ENDS}"""

EXTEND_EPILOG = f"""Examples:

\b
  batchguard jobs extend 17 6f1c0c1e-… --lease 10m

The result is extended or lost. A lease never becomes shorter; one that is over can be extended as long as nobody has
taken the job. A line of --stdin may have lease.{_ENDS}"""

JobId = Annotated[str | None, typer.Argument(metavar="[ID]", help="Of which job.", show_default=False)]
Token = Annotated[str | None, typer.Argument(metavar="[TOKEN]", help="The claim_token.", show_default=False)]
Stdin = Annotated[bool, typer.Option("--stdin", help="Stdin has a line of JSON for each job.")]


@of_queue
def complete(
    call: JobCall,
    id_: JobId = None,
    token: Token = None,
    stdin: Stdin = False,
) -> int:
    """Say that jobs are done."""
    return _end("complete", id_, token, stdin, _no_ending(), call)


@of_queue
def fail(
    call: JobCall,
    id_: JobId = None,
    token: Token = None,
    stdin: Stdin = False,
    error: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; kept with the job.")] = None,
    exit_code: Annotated[int | None, typer.Option(metavar="N", help="What the command ended with; kept too.")] = None,
    no_retry: Annotated[bool, typer.Option("--no-retry", help="It has failed for good.")] = False,
    retry_in: Annotated[
        str | None,
        typer.Option(
            metavar="D", help="When it comes back.  [default: backoff in [jobs], else 10s, doubled each time]"
        ),
    ] = None,
) -> int:
    """Say that jobs have failed: they come back later, or have failed for good after their last attempt."""
    from batchguard.core.durations import parse_duration
    from batchguard.core.job import Ending, clean_error, read_exit_code

    if no_retry and retry_in is not None:
        raise UsageError("--no-retry and --retry-in exclude one another")
    ending = Ending(
        is_final=no_retry,
        retry_in=read_option("--retry-in", retry_in, parse_duration),
        exit_code=read_option("--exit-code", exit_code, read_exit_code),
        error=read_option("--error", error, clean_error),
    )
    return _end("fail", id_, token, stdin, ending, call)


@of_queue
def release(
    call: JobCall,
    id_: JobId = None,
    token: Token = None,
    stdin: Stdin = False,
) -> int:
    """Give jobs back to their place, as if they had not been claimed: no attempt is used."""
    return _end("release", id_, token, stdin, _no_ending(), call)


@of_queue
def extend(
    call: JobCall,
    id_: JobId = None,
    token: Token = None,
    stdin: Stdin = False,
    lease: Annotated[
        str | None, typer.Option(metavar="D", help="How long from now.  [default: lease in [jobs], else 60s]")
    ] = None,
) -> int:
    """Keep jobs for longer."""
    from batchguard.core.job import Ending, read_lease

    ending = Ending(lease=read_option("--lease", lease, read_lease))
    return _end("extend", id_, token, stdin, ending, call)


def _no_ending() -> "Ending":
    from batchguard.core.job import Ending

    return Ending()


def _end(verb: "Verb", id_: str | None, token: str | None, stdin: bool, ending: "Ending", call: JobCall) -> int:
    from batchguard.adapters import report
    from batchguard.core.job import Claim, read_id, read_token
    from batchguard.core.messages import jobs_lost
    from batchguard.runtime.claim import end_jobs

    if stdin and id_ is not None:
        raise UsageError("give ID and TOKEN, or --stdin")
    if not stdin and token is None:
        raise UsageError(f"which job? Give ID and TOKEN as claim printed them: batchguard jobs {verb} 17 6f1c0c1e-…")
    claims = _read_claims(verb, ending) if stdin else [Claim(read_id(id_), read_token(token), ending)]
    results = end_jobs(call.dsn, call.settings, verb, claims)
    if results:
        print_lines([result.to_line() for result in results])
    lost = [result.id for result in results if result.result == "lost"]
    if lost:
        report.say(jobs_lost(lost, len(results)))
        return ExitCode.LOST
    return ExitCode.OK


def _read_claims(verb: "Verb", ending: "Ending") -> "list[Claim]":
    from batchguard.core.job import read_claim
    from batchguard.core.payload import decode_utf8

    claims = []
    for number, line in enumerate(_stdin(), 1):
        try:
            claims.append(read_claim(decode_utf8(line), verb, ending))
        except UsageError as error:
            raise UsageError(f"line {number}: {error}; no job was changed") from None
    return claims
