"""Options that several commands share."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from batchguard.core.errors import UsageError
from batchguard.core.number_table import NumberTable

if TYPE_CHECKING:
    from batchguard.core.job_settings import JobSettings

S = TypeVar("S")
T = TypeVar("T")

Dsn = Annotated[
    str | None,
    typer.Option(
        "-d",
        "--dsn",
        metavar="DSN",
        help="libpq conninfo or URI of the database; else BATCHGUARD_DSN, then the config file.",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="The config file with the number table; else BATCHGUARD_CONFIG, then /etc/batchguard.toml.",
    ),
]
Local = Annotated[
    bool,
    typer.Option(
        "--local/--no-local", help="Use an embedded PostgreSQL of this user on this machine, started when needed."
    ),
]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Say more on stderr: skips, waits, which config file is used.")
]


Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help="100:1, bigint:4711, a range 100:10..12, or a name; may be repeated."),
]
KeyFromName = Annotated[
    str | None, typer.Option("--key-from-name", metavar="NAME", help="The bigint key hashtextextended(NAME, 0).")
]

AllowPooler = Annotated[
    bool | None,
    typer.Option("--allow-pooler/--no-allow-pooler", help="The pooler in between gives each client its own session."),
]


Schema = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The schema of the queue.  [default: schema in [jobs], else batchguard]"),
]


def read_option(option: str, given: S | None, read: Callable[[S], T]) -> T | None:
    """Read what was written after an option; a fault names the option.

    Raises:
        UsageError: it does not read.
    """
    try:
        return None if given is None else read(given)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def searched_files(config: str | None) -> list[str]:
    """Give where a config file is looked for, for those who are told that there is none."""
    from batchguard.adapters.config_file import candidate_files

    return [str(path) for path in candidate_files(config, os.environ)]


def verify_key_name(text: str | None) -> None:
    """Refuse what the server cannot hash: bytes that are no characters, and novels.

    Raises:
        UsageError: it is neither None nor up to 1000 printable characters.
    """
    if text is not None and not (text.isprintable() and 0 < len(text) <= 1000):
        raise UsageError("--key-from-name takes up to 1000 characters of text, in the encoding of the terminal")


def load_config(config: str | None) -> NumberTable:
    """Read the config file that counts.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong.
    """
    from batchguard.adapters.config_file import load_table
    from batchguard.core.number_table import verify_table

    table = load_table(config, os.environ)
    verify_table(table)
    return table


def say_config(config: str | None, table: NumberTable, verbose: bool, log_format: str = "text") -> None:
    """Name the config file that counts, where a person asked for it."""
    if verbose:
        from batchguard.adapters import report

        searched = ", ".join(searched_files(config))
        report.say(f"config file: {table.file or f'none (looked for {searched})'}", log_format)


def choose_dsn(dsn: str | None, local: bool, table: NumberTable) -> str:
    """Give the DSN that counts: the option, the environment, the config file; the embedded server where asked for.

    Raises:
        UsageError: both --dsn and --local.
        BatchguardError: the embedded server cannot be started.
    """
    if dsn is not None and local:
        raise UsageError("--dsn names one server and --local another; give one of them")
    if dsn is not None:
        return dsn
    if local:
        return _start_local()
    if from_environment := os.environ.get("BATCHGUARD_DSN"):
        return from_environment
    if table.local:
        return _start_local()
    return table.dsn or ""


def _start_local() -> str:
    from batchguard.adapters import report
    from batchguard.adapters.embedded_server import own_server, start_own_server

    if report.is_terminal() and not (server := own_server(os.environ)).is_set_up:
        report.say(f"setting up a PostgreSQL of your own in {server.folder} (the first time only, a few seconds)")
    return start_own_server(os.environ).dsn


@dataclass(frozen=True)
class JobCall:
    """What every command of the queue needs: where it is, and how it is set."""

    dsn: str
    settings: "JobSettings"
    verbose: bool


def open_jobs(
    dsn: str | None, config: str | None, local: bool, verbose: bool, schema: str | None, *, with_dsn: bool = True
) -> JobCall:
    """Give the database and the settings of the queue; with `with_dsn` False, no database is looked for.

    Raises:
        BatchguardError: a line for the user.
    """
    from batchguard.core.job_settings import build_job_settings, read_schema

    name = read_option("--schema", schema, read_schema)
    table = load_config(config)
    say_config(config, table, verbose)
    settings = build_job_settings({} if name is None else {"schema": name}, table.jobs)
    return JobCall(choose_dsn(dsn, local, table) if with_dsn else "", settings, verbose)
