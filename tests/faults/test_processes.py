"""Faults of processes and of what they live on: memory, descriptors, process numbers, standard streams, terminals."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchguard.adapters import process_tree
from tests.fixtures.batch import command, read_life
from tests.fixtures.control_group import MakeGroup
from tests.fixtures.forkers import FORK_STORM, HOPPER
from tests.fixtures.guard import COMMAND, SHORT, StartRun, clean_environment
from tests.fixtures.server import Server
from tests.fixtures.terminal import Terminal, run_on
from tests.fixtures.waiting import until
from tests.fixtures.watch import alive

EATER = "import os, sys; os.write(1, b'eating'); x = bytearray(1 << 30)"


# Memory, process numbers, descriptors


@pytest.mark.root
def test_command_killed_for_want_of_memory(run: StartRun, make_group: MakeGroup, server: Server) -> None:
    """The kernel kills the command for its memory: 137, as from a shell, and the lock is given back."""
    group = make_group("memory", 30_000_000)
    script = f'echo $$ > {group}; exec "$@"'
    running = run("--key", "100:1", "--", "sh", "-c", script, "sh", sys.executable, "-S", "-c", EATER)
    assert (running.code(), running.out, running.err) == (137, "eating", "")
    assert server.locks() == []


@pytest.mark.root
@pytest.mark.parametrize(
    ("limit", "code", "message"),
    [
        (
            1,
            69,
            "cannot guard 100:1: Resource temporarily unavailable. Raise the limit of processes: ulimit -u, or pids.max ",
        ),
        (2, 126, "cannot run sh: Resource temporarily unavailable; exit 126."),
        (3, 0, ""),
    ],
    ids=["no guard", "no command", "enough"],
)
def test_fork_fails(limit: int, code: int, message: str, run: StartRun, make_group: MakeGroup, server: Server) -> None:
    """A process limit that leaves no room for the guard, or for the command: never started, one line, nothing left."""
    group = make_group("pids", limit)

    def enter() -> None:
        group.write_text(str(os.getpid()))

    running = run("--key", "100:1", "--", "sh", "-c", "echo ran", preexec_fn=enter)
    assert running.code() == code
    assert running.out == ("" if code else "ran\n")
    assert running.err.startswith(f"batchguard: {message}" if code else "")
    assert running.err.count("\n") == (1 if code else 0)
    assert server.locks() == []


@pytest.mark.root
def test_no_thread_for_the_name(run: StartRun, make_group: MakeGroup, server: Server) -> None:
    """The name of the server cannot be looked up without a thread: 69, and the line says what to raise."""
    group = make_group("pids", 2)
    dsn = re.sub(r"host=\S+", "host=localhost", server.dsn)
    running = run("--key", "100:1", "--", "true", dsn=dsn, preexec_fn=lambda: group.write_text(str(os.getpid())))
    assert running.code() == 69
    assert (
        "the system refused a thread to look its name up; raise ulimit -u, or pids.max of the control group"
        in running.err
    )


def test_few_descriptors(run: StartRun, server: Server) -> None:
    """From too few descriptors to enough: the command runs with all that guards it, or not at all, with one line."""
    outcomes = []
    for limit in range(6, 14):
        running = run(
            "--key", "100:1", "--", "sh", "-c", "echo ran",
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        )  # fmt: skip
        code = running.code()
        assert (running.out, running.err.count("\n")) == (("ran\n", 0) if code == 0 else ("", 1))
        assert code == 0 or "oo many open files" in running.err or "no descriptor" in running.err
        outcomes.append(code)
    assert (outcomes[0], outcomes[-1]) == (69, 0)
    assert set(outcomes) <= {69, 126, 0}


@pytest.mark.parametrize("who", ["keeper", "guard"])
def test_descriptors_run_out_meanwhile(who: str, run: StartRun, server: Server, tmp_path: Path) -> None:
    """A process of ours that can open nothing any more is one fault: the tree is dead all the same, 76."""
    running = run("--key", "100:1", "--", *command(tmp_path / "life", 600, "--stubborn", "--child"))
    until(lambda: len(running.tree()) == 2)
    tree = running.tree()
    resource.prlimit(getattr(running, who), resource.RLIMIT_NOFILE, (8, 8))  # fewer, and poll(2) itself fails
    server.terminate_holder()
    assert running.code() == 76
    assert alive(tree) == []


# Standard streams


@pytest.mark.parametrize("closed", ["0", "1", "2", "01", "12", "012"])
def test_closed_standard_streams(closed: str, server: Server, tmp_path: Path) -> None:
    """What the caller had closed is closed for the command too, and nothing of ours takes its place."""
    show = f"[ -e /proc/$$/fd/{closed[0]} ]; echo $? >{tmp_path}/seen; exit 5"
    argv = [*COMMAND, "run", *SHORT, "--key", "100:1", "--", "sh", "-c", show]
    closing = "".join(f" {fd}>&-" for fd in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@"{closing}', "sh", *argv], check=False, env=clean_environment(BATCHGUARD_DSN=server.dsn)
    )
    assert done.returncode == 5
    assert (tmp_path / "seen").read_text() == "1\n"


@pytest.mark.parametrize("kind", ["full disk", "broken pipe", "full pipe"])
def test_stderr_that_takes_nothing(kind: str, run: StartRun, server: Server, tmp_path: Path) -> None:
    """A line that cannot be written delays no kill and changes no exit code."""
    reading, writing = os.pipe()
    if kind == "full disk":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    elif kind == "full pipe":
        os.set_blocking(writing, False)
        while True:
            try:
                os.write(writing, b"x" * 65536)
            except BlockingIOError:
                break
        os.set_blocking(writing, True)
    if kind == "broken pipe":
        os.close(reading)
    batch = command(tmp_path / "life", 600, "--stubborn", "--child")
    running = run("--key", "100:1", "--", *batch, stderr=writing)
    os.close(writing)
    until(lambda: len(running.tree()) == 2)
    tree = running.tree()
    begun = time.monotonic()
    server.terminate_holder()
    assert running.code() == 76
    assert time.monotonic() - begun < 5
    assert alive(tree) == []
    if kind != "broken pipe":
        os.close(reading)


# PID 1 of a container


def in_container(*arguments: str) -> list[str]:
    """Give the command line that runs batchguard as PID 1 of a process namespace of its own."""
    return [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        *COMMAND,
        "run",
        *SHORT,
        "--key",
        "100:1",
        *arguments,
    ]


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "script", "code"),
    [
        ((), "sleep 0.5 & (setsid sh -c 'sleep 0.2 & sleep 0.1' &); sleep 0.3; exit 7", 7),
        ((), "kill -KILL $$", 137),
        (("--max-runtime", "0.5"), "(setsid sh -c \"trap '' TERM; sleep 600 & sleep 600\" &); sleep 600", 124),
    ],
    ids=["orphans", "signal", "time limit"],
)
def test_pid_1_of_a_container(options: tuple[str, ...], script: str, code: int, server: Server) -> None:
    """As PID 1, orphans of the batch are reaped, exit codes are right, and nothing is left."""
    argv = in_container(*options, "--", "sh", "-c", script)
    done = subprocess.run(argv, check=False, env=clean_environment(BATCHGUARD_DSN=server.dsn), capture_output=True)
    assert done.returncode == code
    until(lambda: not server.locks())


@pytest.mark.root
def test_orphans_in_a_container_do_not_pile_up(server: Server, tmp_path: Path) -> None:
    """Orphans that end while the batch goes on do not stay as zombies."""
    script = "for i in 1 2 3 4 5 6 7 8 9; do (sleep 0.01 &); done; sleep 0.5; grep -l '^State:.Z' /proc/[0-9]*/status; exit 3"
    done = subprocess.run(
        in_container("--", "sh", "-c", script),
        check=False,
        env=clean_environment(BATCHGUARD_DSN=server.dsn),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


@pytest.mark.root
@pytest.mark.event("guard killed")
def test_guard_killed_in_a_container(server: Server, tmp_path: Path) -> None:
    """Kill -9 of the guard under a keeper that is PID 1: dead, then unlocked, 76."""
    argv = in_container("--", *command(tmp_path / "life", 600, "--stubborn", "--child"))
    with subprocess.Popen(argv, env=clean_environment(BATCHGUARD_DSN=server.dsn), stderr=subprocess.PIPE) as popen:
        try:
            until(lambda: len(process_tree.living_descendants(popen.pid)) == 4)
            _, guard, *tree = (process.pid for process in process_tree.living_descendants(popen.pid))
            os.kill(guard, signal.SIGKILL)
            assert popen.wait(20) == 76
            assert alive(tree) == []
        finally:
            popen.kill()
    until(lambda: not server.locks())


# Commands that resist


def test_command_that_stops_itself_when_term_arrives(run: StartRun, server: Server) -> None:
    """SIGSTOP in the handler of TERM, or in the whole group: KILL comes all the same."""
    script = "trap 'kill -STOP 0' TERM; echo ready; while :; do sleep 0.05; done"
    running = run("--key", "100:1", "--", "sh", "-c", script)
    assert running.popen.stdout is not None
    running.popen.stdout.readline()
    tree = running.tree()
    server.terminate_holder()
    assert running.code() == 76
    assert alive(tree) == []


@pytest.mark.event("our backend is terminated")
@pytest.mark.parametrize("program", [FORK_STORM, HOPPER], ids=["storm", "hopper"])
def test_what_keeps_forking_while_it_is_killed(program: str, run: StartRun, server: Server) -> None:
    """A storm of short-lived sessions, or one process that hops from fork to fork: caught, and nothing is left."""
    running = run("--key", "100:1", "--", sys.executable, "-S", "-c", program)
    until(lambda: len(running.tree()) > 1)
    guard = running.guard
    begun = time.monotonic()
    server.terminate_holder()
    assert running.code() == 76
    assert time.monotonic() - begun < 0.5 + 5
    assert alive([guard]) == []  # what it could not catch would be ours now, and fail this test


@pytest.mark.parametrize("who", ["keeper", "guard"])
def test_fork_storm_and_a_death_of_ours(who: str, run: StartRun, server: Server) -> None:
    """The same when one of our own processes is killed: the other catches everything, and only then unlocks."""
    running = run("--key", "100:1", "--", sys.executable, "-S", "-c", FORK_STORM)
    until(lambda: len(running.tree()) > 1)
    killer = running.keeper if who == "guard" else running.guard
    os.kill(getattr(running, who), signal.SIGKILL)
    assert running.code() == (76 if who == "guard" else -9)
    until(lambda: killer == running.keeper or not alive([killer]))
    until(lambda: not server.locks())


# Terminals

forkpty_warns = pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")


@forkpty_warns
def test_stop_key(terminal: list[Terminal], server: Server, tmp_path: Path) -> None:
    """Ctrl-Z stops neither the guard nor a command that has the terminal: the lock stays checked, the batch ends."""
    running = run_on(terminal, server, "--", *command(tmp_path / "life", 3))
    until(lambda: read_life(tmp_path / "life").last > 0)
    for _ in range(3):
        running.type(b"\x1a")
        time.sleep(0.1)  # typed, not pasted
    assert running.code() == 0


@forkpty_warns
def test_job_control_of_a_shell(terminal: list[Terminal], server: Server) -> None:
    """In the background the command stops when it reads the terminal; its lock is checked on, and Ctrl-C after fg ends it."""
    shell = Terminal(["bash", "--norc", "--noprofile", "-i"], clean_environment(BATCHGUARD_DSN=server.dsn, PS1="$ "))
    terminal.append(shell)
    words = " ".join([*COMMAND, "run", *SHORT, "--key", "100:1", "--", "cat"])
    shell.type(f"{words} & echo star''ted\n".encode())
    until(lambda: shell.shows("started"))
    lock = until(server.locks)

    def cat() -> process_tree.Process | None:
        found = [process_tree.inspect(pid) for pid in process_tree.descendants(shell.pid)]
        return next((process for process in found if process and process.state == "T"), None)

    stopped = until(cat)
    assert stopped is not None
    begun = time.monotonic()
    until(lambda: time.monotonic() > begun + 3)  # longer than the longest silence
    assert server.locks() == lock
    shell.type(b"fg\n")
    until(lambda: shell.shows("fg"))
    shell.type(b"\x03")
    until(lambda: not alive([stopped.pid]))
    until(lambda: not server.locks())
    shell.type(b"echo code=$?\n")
    until(lambda: shell.shows("code=130"))
    shell.type(b"exit\n")
    shell.code()


@forkpty_warns
def test_terminal_that_closes_under_a_stubborn_command(
    terminal: list[Terminal], server: Server, tmp_path: Path
) -> None:
    """A command that ignores the hangup goes on, guarded; a loss still kills it."""
    batch = ["sh", "-c", 'trap "" HUP; echo ready; exec "$@" </dev/null >/dev/null 2>&1', "sh"]
    running = run_on(terminal, server, "--", *batch, *command(tmp_path / "life", 600))
    until(lambda: read_life(tmp_path / "life").last > 0)
    os.close(running.fd)
    running.fd = os.open(os.devnull, os.O_RDWR)
    begun = time.monotonic()
    until(lambda: time.monotonic() > begun + 3)  # longer than the longest silence
    assert server.locks()
    server.terminate_holder()
    assert running.code() == 76
