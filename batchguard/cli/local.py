"""`batchguard local …`: an embedded PostgreSQL of one's own."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from batchguard.core.errors import UsageError
from batchguard.core.exit_codes import ExitCode

if TYPE_CHECKING:
    from batchguard.adapters.embedded_server import EmbeddedServer

app = typer.Typer(
    help="An embedded PostgreSQL for trying things out, and for one user on one machine: it guards nobody else's runs.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


def _server() -> "EmbeddedServer":
    from batchguard.adapters.embedded_server import own_server

    return own_server(os.environ)


def _start() -> "EmbeddedServer":
    from batchguard.adapters.embedded_server import start_own_server

    return start_own_server(os.environ)


@app.command()
def start() -> int:
    """Start the server, and set it up the first time."""
    typer.echo(f"running: {_start().dsn}")
    return ExitCode.OK


@app.command()
def stop() -> int:
    """Stop the server; its data stays, and a batch that runs under it is ended."""
    typer.echo("stopped" if _server().stop() else "it was not running")
    return ExitCode.OK


@app.command()
def status() -> int:
    """Say whether the server runs; exit 1 when it does not."""
    server = _server()
    pid = server.postmaster_pid
    if pid is None:
        typer.echo(f"not running; data {'in ' + str(server.data) if server.is_set_up else 'not set up yet'}")
        return ExitCode.FINDINGS
    typer.echo(f"running: pid {pid}, data in {server.data}")
    typer.echo("It guards the runs of this user on this machine only.")
    return ExitCode.OK


@app.command()
def dsn() -> int:
    """Print the server's conninfo, for psql and other programs."""
    typer.echo(_server().dsn)
    return ExitCode.OK


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def psql(arguments: Annotated[list[str] | None, typer.Argument(metavar="[PSQL ARG]...")] = None) -> int:
    """Start the server when needed and open psql on it."""
    server = _start()
    program = str(server.programs / "psql")
    os.execv(program, [program, "-d", server.dsn, *(arguments or ())])


@app.command()
def destroy(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> int:
    """Stop the server and remove all that was made for it: its data, for root also its programs and account.

    A batch that runs under it is ended.
    """
    from batchguard.adapters.embedded_server import destroy_own_server

    if not yes:
        if not os.isatty(0):
            raise UsageError("destroy removes the local server with its data; say --yes")
        typer.confirm("Remove the local server with all its data?", abort=True)
    destroy_own_server(os.environ)
    typer.echo("removed")
    return ExitCode.OK


def register(top: typer.Typer) -> None:
    """Add the group."""
    top.add_typer(app, name="local")
