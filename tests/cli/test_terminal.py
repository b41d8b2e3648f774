"""On a terminal: the command has it, and gives it back."""

import os
import signal
import termios

import pytest

from tests.fixtures.server import Server
from tests.fixtures.terminal import Terminal, run_on
from tests.fixtures.waiting import until

# A test process has threads of its runner, of which Python 3.12 warns at a fork; the child executes at once.
pytestmark = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")


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
