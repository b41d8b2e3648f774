"""Process trees: finding every descendant of a process, killing them all, reaping what becomes ours.

A subreaper (prctl(2), PR_SET_CHILD_SUBREAPER) inherits every orphan below it, so `setsid` and
double forks do not leave the tree. The walk reads `/proc/PID/task/TID/children`, from the top: what
hops from fork to fork is always below us, where a scan of all of /proc runs behind it.
"""

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from batchguard.core.outcome import ChildEnd

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_visible() -> bool:
    """Tell whether the kernel shows children in /proc: mounted, and built with CONFIG_PROC_CHILDREN."""
    return os.access(f"/proc/{os.getpid()}/task/{os.getpid()}/children", os.R_OK)


def become_subreaper() -> None:
    """Make every orphan below this process its child; not inherited by fork."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel KILL this process when `parent`'s thread ends; at once if it already has.

    Lost when a set-uid program is executed (prctl(2)), so it is a second line, not the first.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat, as far as it is needed."""

    pid: int
    state: str
    parent: int
    group: int

    @property
    def is_dead(self) -> bool:
        """A zombie has run its last instruction; only its exit status is left."""
        return self.state in "ZX"


def inspect(pid: int) -> Process | None:
    """Look at one process; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses; the last one ends it.
    state, parent, group = stat[stat.rindex(b")") + 2 :].split(maxsplit=3)[:3]
    return Process(pid, state.decode(), int(parent), int(group))


def children(pid: int) -> list[int]:
    """List the direct children of every thread of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return found


def descendants(pid: int, strangers: frozenset[int] = frozenset()) -> list[int]:
    """List everything below a process, parents before children; zombies included, `strangers` and theirs left out."""
    found: list[int] = []
    level = [below for below in children(pid) if below not in strangers]
    while level:
        found += level
        level = [below for parent in level for below in children(parent)]
    return found


def living_descendants(pid: int, strangers: frozenset[int] = frozenset()) -> list[Process]:
    """List what is alive below a process but `strangers` and theirs."""
    seen = (inspect(below) for below in descendants(pid, strangers))
    return [process for process in seen if process is not None and not process.is_dead]


def signal_tree(pid: int, number: int) -> int:
    """Signal everything alive below a process once, then CONT it; give how many there were.

    Two looks come before the first signal: a process whose parent ends while we look (setsid(1) forks and ends at
    once) is missed by one look in some hundred. Not after it, for what a trap starts then is to be left alone. Parents
    come before their children, or a shell would complain of a child's death. CONT comes after the signal, so that a
    stopped process acts on it instead of sleeping on.
    """
    living = dict.fromkeys(process.pid for _ in range(2) for process in living_descendants(pid))
    for wanted in (number, signal.SIGCONT):
        for below in living:
            send(below, wanted)
    return len(living)


def kill_tree(pid: int, strangers: frozenset[int] = frozenset()) -> None:
    """Send KILL to everything below a process but `strangers` and theirs; to be called again until nothing is left."""
    for below in descendants(pid, strangers):
        send(below, signal.SIGKILL)


def has_children() -> bool:
    """Tell whether this process, a subreaper, has anything below it: dead or alive, until it is reaped.

    Exact where a walk is not: a process that hops from fork to fork can be between two places
    while we look, but it always is somebody's child, and in the end ours.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def has_only(strangers: frozenset[int]) -> bool:
    """Tell whether nothing but `strangers` is directly below this process; False when that cannot be read.

    One answer proves nothing: while we read, a process that hops from fork to fork may be between
    two places. Below a subreaper it can be so once or twice, but not every time.
    """
    own = os.getpid()
    try:
        found = Path(f"/proc/{own}/task/{own}/children").read_bytes().split()
    except OSError:
        return False
    return {int(pid) for pid in found} <= strangers


def count_group(group: int, living: list[Process]) -> int:
    """Count the living members of a process group, some of which `living` may have missed.

    A zombie that its own parent does not reap is still a member for the kernel, but no longer runs.
    """
    found = sum(process.group == group for process in living)
    if found:
        return found
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        return 1
    zombies = any((process := inspect(pid)) and process.group == group for pid in descendants(os.getpid()))
    return 0 if zombies else 1


def send(pid: int, number: int) -> None:
    """Signal one process; one that has ended, or is not ours to signal, is left alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def send_group(group: int, number: int) -> None:
    """Signal a process group; an empty one is left alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def reap() -> dict[int, ChildEnd]:
    """Collect every child that has ended, adopted ones too; the one place where this process waits for any."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = child_end(status)
    return ended


def child_end(status: int) -> ChildEnd:
    """Read a wait status."""
    if os.WIFSIGNALED(status):
        return ChildEnd(signal=os.WTERMSIG(status))
    return ChildEnd(exit=os.WEXITSTATUS(status))


def is_alone_in_group() -> bool:
    """Tell whether nobody but this process and its parent (guard and keeper) is in its process group."""
    own = os.getpgrp()
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) not in (os.getpid(), os.getppid()):
            process = inspect(int(entry))
            if process is not None and process.group == own:
                return False
    return True
