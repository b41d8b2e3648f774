"""The command line as a whole: the commands, and the one place where an error becomes an exit code."""

import io
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from batchguard import __version__
from batchguard.cli import run
from batchguard.core.errors import BatchguardError, SignalReceived, TableError
from batchguard.core.exit_codes import ExitCode, exit_code_of_signal

# Rich would load for the sake of a prettier help; a cron prefix pays that every minute.
app = typer.Typer(
    name="batchguard",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Put in front of a batch so that it never runs twice at once, on any number of hosts that share a PostgreSQL.",
)
run.register(app)


def _register_others(argv: Sequence[str]) -> None:
    """Add all commands but `run`, unless it is the one: cron starts it every minute, and the others take 30 ms."""
    first = next((argument for argument in argv if not argument.startswith("-")), None)
    if first == "run" or len(app.registered_commands) > 1:
        return
    from batchguard.cli import doctor, jobs, keys, local, locks

    for module in (locks, doctor, jobs, keys, local):
        module.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchguard {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option("-V", "--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Hold the options that stand before a command."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line and give its exit code; every error a user can cause is one line on stderr."""
    # A letter that the terminal does not know must not end us: what sessions say of themselves is in any language.
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None where the caller has closed it
        sys.stdout.reconfigure(errors="backslashreplace")
    _register_others(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args=argv, prog_name="batchguard", standalone_mode=False)
    except TyperException as error:
        return _usage(error)
    except TableError as error:
        return _fail(f"{error} Exit {error.exit_code:d}.", error.exit_code)
    except BatchguardError as error:
        return _fail(str(error), error.exit_code, error.log_format)
    except (KeyboardInterrupt, typer.Abort):
        return exit_code_of_signal(signal.SIGINT)
    except SignalReceived as error:
        return exit_code_of_signal(error.number)
    except SystemExit:  # typer's for a broken pipe (`status | head`), with a 1 that would mean "held"
        return exit_code_of_signal(signal.SIGPIPE)
    except OSError as error:
        return _fail(f"the system refused: {error.strerror} {error.filename or ''}".rstrip(), ExitCode.SOFTWARE)
    except Exception as error:
        if "-v" in sys.argv or "--verbose" in sys.argv:
            traceback.print_exc()
        return _fail(
            f"internal error: {type(error).__name__}: {error}. Please report it with the output of -v.",
            ExitCode.SOFTWARE,
        )
    return code if isinstance(code, int) else 0


def _usage(error: TyperException) -> int:
    """Say what is wrong with a command line; where it is nothing but incomplete, the message is the help."""
    message = error.format_message()
    if "\n" in message:
        typer.echo(message, err=True)
        return ExitCode.USAGE
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "batchguard"
    end = "" if (message := message.rstrip(".")).endswith("?") else "."
    return _fail(f"{message}{end} Try: {command} --help", ExitCode.USAGE)


def _fail(message: str, code: ExitCode, log_format: str = "text") -> int:
    from batchguard.adapters import report

    report.say(message, log_format, exit_code=int(code))
    return int(code)
