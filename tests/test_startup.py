"""What is loaded when: a prefix of every cron line pays for each import, every minute, all night."""

import subprocess
import sys
from pathlib import Path

from tests.fixtures.guard import StartRun, clean_environment
from tests.fixtures.server import Server


def modules_after(code: str, *argv: str, dsn: str = "") -> set[str]:
    """Run a piece of Python in a process of its own, and give the top modules that are loaded at its end."""
    program = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program, *argv],
        env=clean_environment(BATCHGUARD_DSN=dsn),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


MAIN = "from batchguard.cli.app import main\nmain(sys.argv[1:])"
HEAVY = {"rich", "pydantic"}


def test_run_loads_neither_rich_nor_pydantic(server: Server) -> None:
    """A whole run, keeper's side, with psycopg and without what it does not need."""
    loaded = modules_after(MAIN, "run", "--key", "100:1", "--", "true", dsn=server.dsn)
    assert not loaded & HEAVY
    assert "psycopg" in loaded


def test_help_loads_none_of_them() -> None:
    """Help needs no database and no decoration."""
    for argv in (["--help"], ["run", "--help"], ["keys", "--help"], ["local", "--help"], ["status", "--help"]):
        assert not modules_after(MAIN, *argv) & (HEAVY | {"psycopg"})


def test_rich_is_for_terminals_alone(server: Server) -> None:
    """What goes into a pipe, or is JSON, needs no table renderer."""
    for argv in (["status"], ["status", "--json"], ["keys", "--help"], ["hold", "--help"]):
        assert not modules_after(MAIN, *argv, dsn=server.dsn) & HEAVY


def test_guard_has_no_psycopg(start: StartRun) -> None:
    """The guard process, as it runs: nothing of psycopg or libpq is mapped; in the keeper it is."""
    running = start("run", "--key", "100:1", "--", "sleep", "60")
    running.command()
    assert "psycopg" in Path(f"/proc/{running.keeper}/maps").read_text()
    assert "psycopg" not in Path(f"/proc/{running.guard}/maps").read_text()
    assert "psycopg" not in modules_after("import batchguard.runtime.guard")
    running.popen.terminate()
    running.code()
