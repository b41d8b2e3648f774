"""The commands of `batchguard jobs` for who looks after the queue."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchguard.cli.listing import print_lines
from batchguard.cli.options import JobCall, of_queue, read_option
from batchguard.core.errors import UsageError
from batchguard.core.exit_codes import ExitCode

if TYPE_CHECKING:
    from batchguard.core.job import JobRow, QueueStats, Result


def register(jobs: typer.Typer) -> None:
    """Add the commands to the group."""
    jobs.command(epilog=REAP_EPILOG)(reap)
    jobs.command(name="list", epilog=LIST_EPILOG)(list_)
    jobs.command(epilog=SHOW_EPILOG)(show)
    jobs.command(epilog=STATS_EPILOG)(stats)
    jobs.command(epilog=WAIT_EPILOG)(wait)
    jobs.command(epilog=RETRY_EPILOG)(retry)
    jobs.command(epilog=CANCEL_EPILOG)(cancel)
    jobs.command(epilog=PURGE_EPILOG)(purge)


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
OneQueue = Annotated[str | None, typer.Option("--queue", metavar="Q", help="Of this queue alone.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]…", help="Of which jobs.", show_default=False)]


_CODES = """Exit codes: 0; 64 usage; 69 database unreachable; 77 login or right missing; 78 config, standby, no queue
yet."""

REAP_EPILOG = f"""It prints {{"retrying":N,"failed":M}}: how many are pending again, and how many had their last
attempt.

{_CODES}"""


@of_queue
def reap(call: JobCall) -> int:
    """Take jobs back whose lease has expired; every claim does so too, for up to a hundred."""
    from batchguard.runtime.upkeep import Upkeep

    upkeep = Upkeep(call.dsn, call.settings, "reap")
    upkeep.do(upkeep.reap_all)
    _print_counts(retrying=upkeep.tally["pending"], failed=upkeep.tally["failed"])
    return ExitCode.OK


LIST_EPILOG = f"""Examples:

\b
  batchguard jobs list --status failed --queue mail
  batchguard jobs list --json -n 100000 | jq -r 'select(.reason == "lease expired") | .id'

Without --status: what runs, what has failed (the last first), and what is pending; done jobs only with --status done.
A failed job's reason is exit, signal, limit, lease expired, cancelled, no retry or payload; none if fail gave none.

{_CODES}"""


@of_queue
def list_(
    call: JobCall,
    queue: OneQueue = None,
    status: Annotated[
        list[str] | None, typer.Option(metavar="S", help="pending, running, done or failed; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", metavar="N", min=1, help="How many at most.")] = 100,
    as_json: AsJson = False,
) -> int:
    """List jobs, without their payloads."""
    from batchguard.core.job import STATUSES
    from batchguard.core.job_settings import read_queue
    from batchguard.runtime.upkeep import Upkeep

    queue = read_option("--queue", queue, read_queue)
    for name in status or ():
        if name not in STATUSES:
            raise UsageError(f'--status: "{name}" is none of {", ".join(sorted(STATUSES))}')
    wanted = [name for name in STATUSES if (name in status if status else name != "done")]
    upkeep = Upkeep(call.dsn, call.settings, "list")
    found = upkeep.do(lambda: upkeep.list_jobs(wanted, queue, limit))
    if as_json:
        _print_json([asdict(job) for job in found])
        return ExitCode.OK
    rows = [
        (str(job.id), _line(job.queue), job.status, str(job.priority), f"{job.attempts}/{job.max_attempts}", _tell(job))
        for job in found
    ]
    title = f'jobs in "{call.settings.schema}" of {upkeep.subject.database}, times in {_zone()}'
    if len(found) == limit:
        title += f"; these are the first {limit}, -n shows more"
    _print_table(title, ("ID", "QUEUE", "STATUS", "PRIO", "TRIES", "WHEN, WHY"), rows)
    return ExitCode.OK


def _tell(job: "JobRow") -> str:
    """Say what matters of a job in its state."""
    match job.status:
        case "running":
            return f"until {_local(job.claimed_until)}, claimed by {_line(job.claimed_by or 'somebody')}"
        case "done":
            return f"at {_local(job.finished_at)}"
        case "failed":
            return ": ".join(part for part in (f"at {_local(job.finished_at)}", _why(job)) if part)
    after = f", after {why}" if (why := _why(job)) else ""
    return (f"from {_local(job.run_at)} on" if job.run_at else f"since {_local(job.created_at)}") + after


def _why(job: "JobRow") -> str:
    reason = f"exit {job.exit_code}" if job.reason == "exit" and job.exit_code is not None else job.reason
    error = (job.last_error or "").strip().splitlines()
    return ", ".join(part for part in (reason, _line(error[-1]) if error else None) if part)


def _local(moment: str | None) -> str:
    from datetime import datetime

    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S") if moment else "?"
    except (ValueError, OverflowError):  # PostgreSQL's calendar is longer than Python's
        return moment or "?"


def _zone() -> str:
    import time

    return time.tzname[time.localtime().tm_isdst > 0]


def _line(text: str) -> str:
    """Write what somebody else put in as one harmless line."""
    from batchguard.core.job import visible

    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


SHOW_EPILOG = _CODES.replace("0;", "0; 1 there is no such job;")


@of_queue
def show(
    call: JobCall,
    id_: Annotated[str, typer.Argument(metavar="ID", help="Of which job.")],
    as_json: AsJson = False,
) -> int:
    """Show one job whole, with its payload."""
    from batchguard.adapters import report
    from batchguard.core.job import line_with_payload, read_id, visible
    from batchguard.runtime.upkeep import Upkeep

    number = read_id(id_)
    upkeep = Upkeep(call.dsn, call.settings, "show")
    found = upkeep.do(lambda: upkeep.show(number))
    if found is None:
        report.say(f'there is no job {number} in schema "{call.settings.schema}" of {upkeep.subject.database}; exit 1')
        return ExitCode.FINDINGS
    job, payload = found
    if as_json:
        print_lines([line_with_payload(asdict(job), payload or "null")])
        return ExitCode.OK
    facts = {name: value for name, value in asdict(job).items() if value is not None}
    width = max(map(len, [*facts, "payload"]))
    for name, value in facts.items():
        shown = f"{_local(value)} {_zone()}" if name.endswith(("_at", "_until")) else visible(str(value))
        first, *rest = shown.splitlines() or [""]
        typer.echo("\n".join([f"{name:{width}}  {first}", *(" " * (width + 2) + line for line in rest)]))
    typer.echo(f"{'payload':{width}}  {'(the server cannot print it)' if payload is None else payload}")
    return ExitCode.OK


STATS_EPILOG = f"""The keys of --json: queue, ready (claimable now), delayed, running, expired (running, and the lease
is over), failed, done_estimate (counted while there are few, else the planner's guess), oldest_ready_s.

{_CODES}"""


@of_queue
def stats(
    call: JobCall,
    queue: OneQueue = None,
    as_json: AsJson = False,
) -> int:
    """Count what there is in each queue."""
    from batchguard.core.job_settings import read_queue
    from batchguard.runtime.upkeep import Upkeep

    queue = read_option("--queue", queue, read_queue)
    upkeep = Upkeep(call.dsn, call.settings, "stats")
    found = upkeep.do(lambda: upkeep.stats(queue))
    if as_json:
        _print_json([asdict(each) for each in found])
        return ExitCode.OK
    title = f'queues in "{call.settings.schema}" of {upkeep.subject.database}'
    header = ("QUEUE", "READY", "DELAYED", "RUNNING", "EXPIRED", "FAILED", "DONE", "OLDEST READY")
    _print_table(title, header, [_stats_row(each) for each in found])
    return ExitCode.OK


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; in a pipe it has its header as well, since numbers alone do not say what they count."""
    from batchguard.cli.listing import is_terminal, print_listing

    print_listing(title, header, [header, *rows] if rows and not is_terminal() else rows, "none")


def _stats_row(each: "QueueStats") -> Sequence[str]:
    from batchguard.core.durations import format_duration

    counts = (each.ready, each.delayed, each.running, each.expired, each.failed, each.done_estimate)
    age = "" if each.oldest_ready_s is None else format_duration(each.oldest_ready_s)
    return (_line(each.queue), *map(str, counts), age)


WAIT_EPILOG = """Examples:

\b
  batchguard jobs wait "$(batchguard jobs enqueue '{"month": 12}')" --wait 10m

Exit codes: 0 all are done; 1 one has failed; 124 --wait is over; 64 usage; 69 database unreachable, or a job is not
there (purged?), so that nobody can tell; 77 login or right missing; 78 config, standby, no queue yet."""


@of_queue
def wait(
    call: JobCall,
    ids: Ids = None,
    wait_: Annotated[str | None, typer.Option("-w", "--wait", metavar="D", help="Give up after so long.")] = None,
) -> int:
    """Wait until jobs are done, or have failed."""
    from batchguard.adapters import report
    from batchguard.adapters.clock import now
    from batchguard.core.settings import read_setting
    from batchguard.runtime.upkeep import Upkeep

    wanted = _read_ids(ids)
    wait_s = read_option("--wait", wait_, lambda text: float(read_setting("wait", text)))
    states = Upkeep(call.dsn, call.settings, "wait").wait(wanted, now() + (inf if wait_s is None else wait_s))
    if missing := [id_ for id_, state in states.items() if state is None]:
        report.say(f"there is no {_jobs(missing)}; purged? Nobody can tell whether it was done; exit 69")
        return ExitCode.UNREACHABLE
    failed = [id_ for id_, state in states.items() if state == "failed"]
    if unfinished := [id_ for id_, state in states.items() if state in ("pending", "running")]:
        also = f"; {_jobs(failed)} failed" if failed else ""
        report.say(f"waited {wait_} for {_jobs(unfinished)}, not finished yet{also}; exit 124")
        return ExitCode.TIME_LIMIT
    if failed:
        report.say(f"{_jobs(failed)} failed; exit 1. See: batchguard jobs show {failed[0]}")
        return ExitCode.FINDINGS
    return ExitCode.OK


def _read_ids(ids: Sequence[str] | None) -> list[int]:
    from batchguard.core.job import read_id

    if not ids:
        raise UsageError("which jobs? Give their ids")
    return [read_id(text) for text in ids]


def _jobs(ids: Sequence[int]) -> str:
    from batchguard.core.messages import some_ids

    return f"job{'s' if len(ids) > 1 else ''} {some_ids(ids)}"


RETRY_EPILOG = """Examples:

\b
  batchguard jobs retry 17 18
  batchguard jobs retry --queue mail
  batchguard jobs retry --all-queues

A retried job begins anew: no attempts, ready at once. Cancelled jobs are retried only by their ids. A job whose dedupe
key is in use by another one stays failed, and counts as a duplicate.

Exit codes: 0; 1 a job that was named was not retried; 64 usage; 69 database unreachable; 77 login or right missing;
78 config, standby, no queue yet."""


@of_queue
def retry(
    call: JobCall,
    ids: Ids = None,
    queue: Annotated[list[str] | None, typer.Option("--queue", metavar="Q", help="All that failed of a queue.")] = None,
    all_queues: Annotated[bool, typer.Option("--all-queues", "--all", help="All that failed.")] = False,
) -> int:
    """Make failed jobs pending again."""
    from batchguard.core.job_settings import read_queue
    from batchguard.runtime.upkeep import Upkeep

    _verify_choice(bool(ids), bool(queue), all_queues)
    queues = [read_option("--queue", name, read_queue) or "" for name in queue or ()]
    wanted = _read_ids(ids) if ids else []
    upkeep = Upkeep(call.dsn, call.settings, "retry")
    if wanted:
        return _print_results(upkeep.do(lambda: upkeep.retry_ids(wanted)), "retried")
    upkeep.do(lambda: upkeep.retry_queues(None if all_queues else queues))
    _print_counts(retried=upkeep.tally["retried"], duplicates=upkeep.tally["duplicate"])
    return ExitCode.OK


def _verify_choice(*given: bool) -> None:
    choices = "their ids, or --queue" + (", or --all-queues" if len(given) > 2 else "")
    if sum(given) != 1:
        raise UsageError(f"which jobs? Give {choices}" + ("; one of them" if sum(given) else ""))


CANCEL_EPILOG = """Examples:

\b
  batchguard jobs cancel 17
  batchguard jobs cancel --queue mail          (all of it that is pending or running)

A cancelled job has failed, and is not retried but by its id. Who runs it loses it: complete and extend exit 76.

Exit codes: 0; 1 a job that was named was neither pending nor running; 64 usage; 69 database unreachable; 77 login or
right missing; 78 config, standby, no queue yet."""


@of_queue
def cancel(
    call: JobCall,
    ids: Ids = None,
    queue: Annotated[str | None, typer.Option("--queue", metavar="Q", help="All open ones of a queue.")] = None,
) -> int:
    """Cancel jobs that are pending or running."""
    from batchguard.core.job_settings import read_queue
    from batchguard.runtime.upkeep import Upkeep

    _verify_choice(bool(ids), queue is not None)
    name = read_option("--queue", queue, read_queue)
    wanted = _read_ids(ids) if ids else []
    upkeep = Upkeep(call.dsn, call.settings, "cancel")
    if wanted:
        return _print_results(upkeep.do(lambda: upkeep.cancel_ids(wanted)), "cancelled")
    upkeep.do(lambda: upkeep.cancel_queue(name or ""))
    _print_counts(cancelled=upkeep.tally["cancelled"])
    return ExitCode.OK


PURGE_EPILOG = f"""Examples:

\b
  17 4 * * *  batchguard jobs purge --older-than 30d        (in a crontab)
  batchguard jobs purge --older-than 90d --failed

Failed jobs stay without --failed: a cron line must not delete what nobody has looked at yet. The time needs its unit.

{_CODES}"""


@of_queue
def purge(
    call: JobCall,
    older_than: Annotated[str, typer.Option(metavar="D", help="Done at least so long ago.")],
    failed: Annotated[bool, typer.Option("--failed", help="The failed ones too.")] = False,
) -> int:
    """Delete jobs that were done long ago, a few thousand at a time."""
    from batchguard.runtime.upkeep import Upkeep

    seconds = read_option("--older-than", older_than, _read_age) or 0.0
    upkeep = Upkeep(call.dsn, call.settings, "purge")
    upkeep.do(lambda: upkeep.purge(seconds, failed=failed))
    _print_counts(purged=upkeep.tally["purged"])
    return ExitCode.OK


def _read_age(text: str) -> float:
    """Read how old what is deleted must be: 30 for 30d would delete nearly everything."""
    from batchguard.core.durations import parse_duration

    if text.strip()[-1:].isdigit() and parse_duration(text):
        raise UsageError(f"{text} of what? Write {text}d for days, {text}s for seconds")
    return parse_duration(text)


def _print_json(objects: Sequence[dict[str, Any]]) -> None:
    print_lines([json.dumps(each, ensure_ascii=False) for each in objects])


def _print_counts(**counts: int) -> None:
    print_lines([json.dumps(counts, separators=(",", ":"))])


def _print_results(results: "Sequence[Result]", good: str) -> int:
    print_lines([result.to_line() for result in results])
    return ExitCode.OK if all(result.result == good for result in results) else ExitCode.FINDINGS
