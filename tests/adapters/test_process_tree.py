"""Process trees, on real ones."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from batchguard.adapters import process_tree
from batchguard.core.outcome import ChildEnd
from tests.fixtures.waiting import until

ADOPTER = """
import sys
from batchguard.adapters import process_tree
process_tree.become_subreaper()
import subprocess
subprocess.Popen(["sh", "-c", sys.argv[1]])
while True:
    process_tree.reap()
    if sys.stdin.readline() == "":
        break
"""


@pytest.fixture
def adopter() -> Iterator[subprocess.Popen[bytes]]:
    """Give a subreaper with a tree of double forks and sessions below it."""
    script = "setsid sleep 600 & (setsid sh -c 'sleep 600 & sleep 600' &) ; (sleep 600 &) ; sleep 600"
    popen = subprocess.Popen([sys.executable, "-c", ADOPTER, script], stdin=subprocess.PIPE)
    yield popen
    popen.kill()
    popen.wait()
    assert popen.stdin is not None
    popen.stdin.close()


def test_finds_everything_from_the_top(adopter: subprocess.Popen[bytes]) -> None:
    """Whatever its sessions and forks, all of a tree is found: the adopter's sh and the sleeps with their shell."""
    until(lambda: len(process_tree.living_descendants(adopter.pid)) == 7)
    process_tree.kill_tree(adopter.pid)
    until(lambda: not process_tree.living_descendants(adopter.pid))


KILLER = """
import subprocess, sys
from batchguard.adapters import process_tree
process_tree.become_subreaper()
import os
subprocess.Popen([sys.executable, "-c", sys.argv[1]]).returncode = 0
sys.stdin.readline()
while process_tree.has_children():
    process_tree.kill_tree(os.getpid())
    process_tree.reap()
"""
HOPPER = """
import os
print(flush=True)
while True:
    if os.fork():
        os._exit(0)
    os.setsid()
"""


def test_a_tree_that_keeps_forking_is_caught() -> None:
    """A process that hops from fork to fork, a new session each time, is caught and none of it is left."""
    arguments = [sys.executable, "-c", KILLER, HOPPER]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        popen.communicate(b"\n", timeout=5)
        assert popen.returncode == 0


CHANGES_PARENTS = """
import os, random, signal, time
from batchguard.adapters import process_tree
process_tree.become_subreaper()
missed = 0
for _ in range(600):
    ready, tell = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            os.write(tell, b"x")
            time.sleep(60)
        for _ in range(random.randrange(3000)):
            pass
        os._exit(0)
    os.read(ready, 1)
    process_tree.signal_tree(os.getpid(), signal.SIGTERM)
    deadline = time.monotonic() + 2
    while process_tree.has_children() and time.monotonic() < deadline:
        process_tree.reap()
        time.sleep(0.0005)
    missed += process_tree.has_children()
    while process_tree.has_children():
        process_tree.kill_tree(os.getpid())
        process_tree.reap()
    os.close(ready)
    os.close(tell)
print(missed)
"""


@pytest.mark.slow
def test_who_changes_its_parent_is_signalled() -> None:
    """A process whose parent ends while the tree is looked at, as setsid(1) does, gets the signal all the same."""
    done = subprocess.run([sys.executable, "-c", CHANGES_PARENTS], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_stopped_processes_act_on_the_signal() -> None:
    """TERM is followed by CONT, so that a stopped process dies of it."""
    popen = subprocess.Popen([sys.executable, "-c", ADOPTER, "kill -STOP $$; exit 0"], stdin=subprocess.PIPE)
    until(lambda: any(process.state == "T" for process in process_tree.living_descendants(popen.pid)))
    assert process_tree.signal_tree(popen.pid, signal.SIGTERM) == 1
    until(lambda: not process_tree.living_descendants(popen.pid))
    popen.kill()
    popen.wait()
    assert popen.stdin is not None
    popen.stdin.close()


def test_inspect_reads_odd_names(tmp_path: object) -> None:
    """A program whose name has spaces and parentheses does not confuse the reading of its state."""
    script = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a ) R 1 (b', 0, 0, 0); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        popen.stdout.readline()
        process = process_tree.inspect(popen.pid)
        assert process is not None
        assert (process.parent, process.group) == (os.getpid(), os.getpgrp())
        popen.kill()
    assert process_tree.inspect(popen.pid) is None


@pytest.mark.parametrize(
    ("script", "end"), [("exit 7", ChildEnd(exit=7)), ("kill -9 $$", ChildEnd(signal=9)), ("exit 0", ChildEnd(exit=0))]
)
def test_wait_status(script: str, end: ChildEnd) -> None:
    """Exit codes and signals are told apart."""
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", script], dict(os.environ))
    _, status = os.waitpid(pid, 0)
    assert process_tree.child_end(status) == end
