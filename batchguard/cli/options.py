"""Options that several commands share."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

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


class JobCall:
    """What every command of the queue needs: where it is and how it is set; found out when it is asked for."""

    def __init__(self, schema: str | None, dsn: str | None, config: str | None, local: bool, verbose: bool) -> None:
        """Keep the options as they were given."""
        self._schema = schema
        self._dsn = dsn
        self._config = config
        self._local = local
        self.verbose = verbose

    @functools.cached_property
    def table(self) -> NumberTable:
        """The config file."""
        table = load_config(self._config)
        say_config(self._config, table, self.verbose)
        return table

    @functools.cached_property
    def settings(self) -> "JobSettings":
        """The settings of the queue."""
        from batchguard.core.job_settings import build_job_settings, read_schema

        schema = read_option("--schema", self._schema, read_schema)
        return build_job_settings({} if schema is None else {"schema": schema}, self.table.jobs)

    @functools.cached_property
    def dsn(self) -> str:
        """The database."""
        return choose_dsn(self._dsn, self._local, self.table)


def of_queue(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options that say where the queue is; its first parameter is the call they lead to."""

    @functools.wraps(command, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def call_command(
        schema: Schema = None,
        dsn: Dsn = None,
        config: Config = None,
        local: Local = False,
        verbose: Verbose = False,
        **own: Any,
    ) -> int:
        return command(JobCall(schema, dsn, config, local, verbose), **own)

    # Typer reads the parameters of what it is given: the command's own, and after them those that all have.
    shared = list(inspect.signature(call_command, follow_wrapped=False).parameters.values())[:-1]
    parameters = [*list(inspect.signature(command).parameters.values())[1:], *shared]
    call_command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    call_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call_command
