"""`batchguard run`."""

from functools import partial
from typing import Annotated, Any

import typer

from batchguard.cli.options import (
    AllowPooler,
    Config,
    Dsn,
    KeyFromName,
    Keys,
    Local,
    Verbose,
    choose_dsn,
    load_config,
    read_option,
    say_config,
    searched_files,
    verify_key_name,
)
from batchguard.core.errors import UsageError
from batchguard.core.settings import SETTING_NAMES, RunRequest, build_settings, option_of, read_setting, timing_of_table

EPILOG = """Examples:

\b
  batchguard run --key 100:1 -- /opt/batch/daily_sales.sh
  batchguard run --key daily_sales --wait 10m -- java -jar sales.jar
  batchguard run --key 100:10..12 -- sh -c 'work on slot "$BATCHGUARD_SLOT"'

Exit codes: the command's own; 75 skipped; 76 lock lost; 124 over --max-runtime; 126, 127 command not executable or not
found; 64 usage; 69 database unreachable; 77 login or right missing; 78 config, key, pooler, standby, unsafe timing."""


def _shell(given: str | None) -> None:
    if given is not None:
        raise UsageError(f"-c is not an option: the command is started without a shell. Write: -- sh -c '{given}'")


def run(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND [ARG]...", help="The command, started without a shell.")
    ] = None,
    key: Keys = None,
    key_from_name: KeyFromName = None,
    wait: Annotated[
        str | None,
        typer.Option(
            "-w", "--wait", "--timeout", metavar="D", help="Wait this long for the lock, or 'forever'. [default: 0]"
        ),
    ] = None,
    nonblock: Annotated[
        bool, typer.Option("-n", "--nonblock", help="The same as --wait 0; beats the config file.")
    ] = False,
    shared: Annotated[
        bool | None, typer.Option("--shared/--exclusive", " /-x", help="Share the lock with other --shared runs.")
    ] = None,
    skip_code: Annotated[
        int | None,
        typer.Option(
            "-E", "--skip-code", "--conflict-exit-code", metavar="N", help="Exit code of a skipped run. [default: 75]"
        ),
    ] = None,
    check_interval: Annotated[
        str | None, typer.Option(metavar="D", help="From one check of the lock to the next. [default: 5s]")
    ] = None,
    check_timeout: Annotated[
        str | None, typer.Option(metavar="D", help="A check unanswered for this long has failed. [default: 20s]")
    ] = None,
    kill_after: Annotated[
        str | None, typer.Option(metavar="D", help="From the first signal to KILL. [default: 10s]")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="D", help="The server gives a silent session up after this. [default: 60s]")
    ] = None,
    settle: Annotated[
        str | None,
        typer.Option(
            metavar="auto|always|off|D",
            help="Wait before the start while a run from before may still be dying; "
            "auto: after a restart, crash or failover of the server. [default: auto]",
        ),
    ] = None,
    signal: Annotated[
        str | None, typer.Option("--signal", metavar="SIG", help="First signal on a loss or a limit. [default: TERM]")
    ] = None,
    max_runtime: Annotated[
        str | None, typer.Option(metavar="D", help="End the command after this long; exit 124. [default: none]")
    ] = None,
    min_hold: Annotated[
        str | None, typer.Option(metavar="D", help="Keep the lock at least this long after taking it. [default: none]")
    ] = None,
    warn_held: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="On a skip, say so when the holder is older than this or is not batchguard. [default: none]",
        ),
    ] = None,
    wait_descendants: Annotated[
        str | None,
        typer.Option(
            metavar="group|all|none",
            help="The batch ends with its process group, with all it started, or with the command. [default: group]",
        ),
    ] = None,
    inherit_lock: Annotated[
        bool | None,
        typer.Option(
            "--inherit-lock/--no-inherit-lock", help="Let the command keep the lock's socket open. [default: yes]"
        ),
    ] = None,
    connect_timeout: Annotated[
        str | None, typer.Option(metavar="D", help="For each address that is tried. [default: 10s]")
    ] = None,
    connect_retry: Annotated[
        str | None, typer.Option(metavar="D", help="Keep trying to connect for this long. [default: 0]")
    ] = None,
    allow_pooler: AllowPooler = None,
    status_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Replace this file by one JSON object about the last real run.")
    ] = None,
    status_skips: Annotated[
        bool | None, typer.Option("--status-skips/--no-status-skips", help="Let skips replace the status file too.")
    ] = None,
    log_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Append one JSON line a run, skips included with their holder.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="text|json", help="The lines on stderr. [default: text]")
    ] = None,
    shell: Annotated[str | None, typer.Option("-c", hidden=True, callback=_shell)] = None,
    dsn: Dsn = None,
    config: Config = None,
    local: Local = False,
    verbose: Verbose = False,
) -> int:
    """Run a command under a PostgreSQL advisory lock; skip it when somebody else holds the lock."""
    given = {name: value for name, value in locals().items() if name in SETTING_NAMES and value is not None}
    if nonblock:
        given["wait"] = "0"
    return _run(tuple(command or ()), tuple(key or ()), key_from_name, given, dsn, config, local, verbose)


def _run(
    command: tuple[str, ...],
    keys: tuple[str, ...],
    key_from_name: str | None,
    options: dict[str, Any],
    dsn: str | None,
    config: str | None,
    local: bool,
    verbose: bool,
) -> int:
    from batchguard.core.number_table import choose_keys, settings_of_others
    from batchguard.core.timing import verify_timing
    from batchguard.runtime.run import run as run_under_lock

    if not command or not command[0]:
        raise UsageError("no command: write batchguard run --key 100:1 -- COMMAND [ARG]...")
    if not keys and key_from_name is None:
        if any(word.startswith("--key") for word in command):
            raise UsageError("--key stands after the command; options go before it")
        raise UsageError("which lock? Give --key 100:1 (a category and a number of your own choice) or a name")
    verify_key_name(key_from_name)
    given = {name: read_option(option_of(name), value, partial(read_setting, name)) for name, value in options.items()}
    table = load_config(config)
    chosen = choose_keys(table, keys, searched_files(config))
    others = settings_of_others(table, chosen.keys)
    settings = build_settings(given, chosen.settings, is_listed=bool(others))
    reckoned = others or ([table.defaults] if table.defaults else [])
    verify_timing(settings.timing)
    say_config(config, table, verbose, settings.log_format)
    text = " ".join(part for part in (chosen.text, key_from_name) if part)
    return run_under_lock(
        RunRequest(
            settings=settings,
            argv=command,
            keys=chosen.keys,
            key_from_name=key_from_name,
            key_text=text,
            name=chosen.name or key_from_name,
            others_window=max((timing_of_table(other).window for other in reckoned), default=0.0),
            dsn=choose_dsn(dsn, local, table),
            verbose=verbose,
        )
    )


def register(app: typer.Typer) -> None:
    """Add the command; it stops parsing at the first operand, as flock, timeout and env do."""
    app.command(context_settings={"allow_interspersed_args": False}, epilog=EPILOG)(run)
