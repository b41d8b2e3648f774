"""On a terminal: the command has it, and gives it back."""

import contextlib
import os
import signal
import termios
from collections.abc import Iterator

import pytest

from batchguard.adapters import process_tree
from tests.fixtures.guard import COMMAND, SHORT, clean_environment
from tests.fixtures.server import Server
from tests.fixtures.waiting import until

# A test process has threads of its runner, of which Python 3.12 warns at a fork; the child executes at once.
pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")


class Terminal:
    """A command line that is the foreground job of a terminal of its own."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self.pid, self.fd = os.forkpty()
        if self.pid == 0:
            os.execvpe(argv[0], argv, environment)
        os.set_blocking(self.fd, False)
        self.shown = ""

    def shows(self, text: str) -> bool:
        """Tell whether the text has been shown by now."""
        with contextlib.suppress(BlockingIOError, OSError):
            self.shown += os.read(self.fd, 65536).decode()
        return text in self.shown

    def type(self, keys: bytes) -> None:
        """Type on the keyboard."""
        os.write(self.fd, keys)

    def code(self) -> int:
        """Wait for the end; give the exit code."""
        _, status = until(lambda: (found := os.waitpid(self.pid, os.WNOHANG))[0] and found)  # type: ignore[misc]
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        """End what is left."""
        if self.pid:
            for pid in [self.pid, *process_tree.descendants(self.pid)]:
                process_tree.send(pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(server: Server) -> Iterator[list[Terminal]]:
    """Collect the terminals of a test, to be ended after it."""
    made: list[Terminal] = []
    yield made
    for one in made:
        one.end()


def run_on(terminals: list[Terminal], server: Server, *arguments: str) -> Terminal:
    """Start a run as the foreground job of a new terminal."""
    argv = [*COMMAND, "run", *SHORT, "--key", "100:1", *arguments]
    terminals.append(Terminal(argv, clean_environment(BATCHGUARD_DSN=server.dsn)))
    return terminals[-1]


def test_command_reads_the_terminal(terminal: list[Terminal], server: Server) -> None:
    """A command in a process group of its own may read from the terminal, and Ctrl-Z does not get it stuck."""
    running = run_on(terminal, server, "--", "sh", "-c", "echo ready; read line; echo got $line")
    until(lambda: running.shows("ready"))
    running.type(b"\x1a")
    running.type(b"hello\n")
    until(lambda: running.shows("got hello"))
    assert running.code() == 0


def test_terminal_is_set_as_before_after_a_kill(terminal: list[Terminal], server: Server) -> None:
    """A program that switched the echo off and is killed does not leave the terminal so."""
    running = run_on(terminal, server, "--max-runtime", "0.5", "--", "sh", "-c", "stty -echo; echo ready; sleep 60")
    before = termios.tcgetattr(running.fd)[3]
    until(lambda: running.shows("ready"))
    assert termios.tcgetattr(running.fd)[3] != before
    until(lambda: running.shows("exit 124"))
    assert termios.tcgetattr(running.fd)[3] == before
    assert running.code() == 124


def test_interrupted_as_a_shell_expects(terminal: list[Terminal], server: Server) -> None:
    """A command that died of Ctrl-C: so do we, or the shell's loop would go on."""
    running = run_on(terminal, server, "--", "sh", "-c", "echo ready; exec sleep 60")
    until(lambda: running.shows("ready"))
    running.type(b"\x03")
    assert running.code() == -signal.SIGINT


def test_interrupt_key(terminal: list[Terminal], server: Server) -> None:
    """Ctrl-C reaches the command once, and its end is ours."""
    script = "trap 'echo interrupted; exit 3' INT; echo ready; while :; do sleep 0.05; done"
    running = run_on(terminal, server, "--", "sh", "-c", script)
    until(lambda: running.shows("ready"))
    running.type(b"\x03")
    until(lambda: running.shows("interrupted"))
    assert running.code() == 3
    assert running.shown.count("interrupted") == 1


def test_skip_is_said_on_a_terminal(terminal: list[Terminal], server: Server) -> None:
    """A person is told of a skip, though cron is not."""
    with server.connect(application_name="DBeaver") as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        skipped = run_on(terminal, server, "--", "true")
        until(lambda: skipped.shows('by "DBeaver"'))
        assert skipped.code() == 75


def test_terminal_that_closes(terminal: list[Terminal], server: Server) -> None:
    """A closed terminal hangs up the command; the lock is given back."""
    running = run_on(terminal, server, "--", "sh", "-c", "echo ready; sleep 600")
    until(lambda: running.shows("ready"))
    os.close(running.fd)
    running.fd = os.open(os.devnull, os.O_RDWR)
    assert running.code() == 128 + signal.SIGHUP
    until(lambda: not server.locks(), within=1)
