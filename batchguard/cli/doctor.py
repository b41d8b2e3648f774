"""`batchguard doctor`."""

import json
import os
import sys
from typing import Annotated

import typer

from batchguard.cli.options import Config, Dsn, Local, Verbose, choose_dsn
from batchguard.core.diagnosis import Diagnosis
from batchguard.core.errors import BatchguardError, UsageError
from batchguard.core.exit_codes import ExitCode
from batchguard.core.job_settings import JobSettings
from batchguard.core.number_table import NumberTable
from batchguard.core.settings import RunSettings

EPILOG = """Examples:

\b
  batchguard doctor
  batchguard doctor --as-cron --config /etc/batchguard.toml
  batchguard doctor --json | python3 -m json.tool --json-lines

Each finding is one line: ok, note, warning or error, and what to do. It takes no lock and changes nothing.

Exit codes: 0 nothing worse than a note; 1 a warning or an error; 64 usage."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for each finding.")] = False,
    as_cron: Annotated[
        bool,
        typer.Option("--as-cron", help="Ask from cron's environment: short PATH, no exports of your shell."),
    ] = False,
    in_cron: Annotated[bool, typer.Option("--in-cron-environment", hidden=True)] = False,
    dsn: Dsn = None,
    config: Config = None,
    local: Local = False,
    verbose: Verbose = False,
) -> int:
    """Find out whether everything is right here for batches under locks, and for the queue."""
    if dsn is not None and local:
        raise UsageError("--dsn names one server and --local another; give one of them")
    if as_cron:
        _become_cron(as_json=as_json, dsn=dsn, config=config, local=local)
    from batchguard.cli.listing import print_listing

    findings = _examine(dsn, config, local, in_cron=in_cron)
    if as_json:
        for finding in findings:
            typer.echo(json.dumps(finding.to_json(), ensure_ascii=False))
    else:
        title = "batchguard doctor" + (", in cron's environment" if in_cron else "")
        rows = [(finding.level, finding.subject, _sentence(finding)) for finding in findings]
        print_listing(title, ("LEVEL", "ABOUT", "FINDING"), rows, "")
    bad = any(finding.level in ("warning", "error") for finding in findings)
    return ExitCode.FINDINGS if bad else ExitCode.OK


def _sentence(finding: Diagnosis) -> str:
    return finding.message + (f". To do: {finding.fix}" if finding.fix else "")


def _examine(dsn: str | None, config: str | None, local: bool, *, in_cron: bool) -> list[Diagnosis]:
    from batchguard.runtime.doctor import Named, examine_config, examine_host, examine_server, examine_settings
    from batchguard.runtime.queue_doctor import examine_queue

    findings = list(examine_host(in_cron=in_cron, environ=os.environ))
    table, about_config = examine_config(config, os.environ)
    findings += [*about_config, *examine_settings(table)]
    source = _source(dsn, local, table)
    try:
        named = Named(source, choose_dsn(dsn, local, table))
    except BatchguardError as error:
        return [*findings, Diagnosis("connection", "error", source, str(error), "correct it")]
    findings += examine_server(named, RunSettings(**table.defaults))
    if not any(finding.id in ("connection", "primary") and finding.level == "error" for finding in findings):
        findings += examine_queue(named.dsn, JobSettings(**table.jobs), is_expected=bool(table.jobs))
    return findings


def _source(dsn: str | None, local: bool, table: NumberTable) -> str:
    """Say where the database is named, in the order in which choose_dsn looks."""
    if dsn is not None:
        return "--dsn"
    if local:
        return "--local"
    if os.environ.get("BATCHGUARD_DSN"):
        return "BATCHGUARD_DSN"
    if table.local or table.dsn:
        return table.file or ""
    return "PG* and defaults"


def _become_cron(*, as_json: bool, dsn: str | None, config: str | None, local: bool) -> None:
    """Start again with the environment that cron gives a job (crontab(5)), in the home folder."""
    import pwd

    try:
        me = pwd.getpwuid(os.getuid())
    except KeyError:
        raise UsageError(f"--as-cron: user id {os.getuid()} has no account, so cron runs nothing for it") from None
    environment = {"HOME": me.pw_dir, "LOGNAME": me.pw_name, "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"}
    options = ["--in-cron-environment", *["--json"] * as_json, *["--local"] * local]
    options += [word for name, value in (("--dsn", dsn), ("--config", config)) if value for word in (name, value)]
    os.chdir(me.pw_dir if os.path.isdir(me.pw_dir) else "/")
    sys.stdout.flush()
    # -P: the home folder is no place to import from.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "batchguard", "doctor", *options], environment)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=EPILOG)(doctor)
