"""Tests that are ended in the middle leave nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchguard.adapters import process_tree
from tests.fixtures.guard import clean_environment
from tests.fixtures.janitor import MARK
from tests.fixtures.waiting import until

ROOT = Path(__file__).parent.parent
MIDDLE = "tests/faults/test_hosts.py::test_tree_is_dead_before_the_lock_is_free"


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a folder for temporary files with a short name, for the sockets in it."""
    with tempfile.TemporaryDirectory(prefix="bg-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def marked(place: Path) -> list[int]:
    """List the processes of tests whose folder is in this place."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            is_server = entry.name.isdigit() and Path(os.readlink(entry / "cwd")).is_relative_to(place)
        except OSError:
            continue
        if is_server or any(line.startswith(f"{MARK}={place}/".encode()) for line in environment):
            found.append(int(entry.name))
    return found


def namespaces(pids: list[int]) -> list[str]:
    """List the network namespaces that these processes have made."""
    folder = Path("/run/netns")
    return [entry.name for pid in pids for entry in folder.glob(f"bg{pid}-*")]


@pytest.mark.netns
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "workers"),
    [(signal.SIGINT, ()), (signal.SIGINT, ("-n", "2")), (signal.SIGTERM, ()), (signal.SIGKILL, ("-n", "2"))],
    ids=["Ctrl-C", "Ctrl-C with workers", "TERM", "KILL with workers"],
)
def test_ended_in_the_middle(number: signal.Signals, workers: tuple[str, ...], place: Path) -> None:
    """Ctrl-C, TERM and KILL to all of pytest: no namespace, no process, no data folder is left."""
    environment = clean_environment(TMPDIR=str(place))
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *workers, MIDDLE]
    with subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as popen:
        until(lambda: any("batch.py" in _command_line(pid) for pid in marked(place)), within=60)
        testers = [popen.pid, *process_tree.descendants(popen.pid)]
        assert len(namespaces(testers)) >= 3
        assert list(place.glob("*/*/data/postmaster.pid"))
        os.killpg(popen.pid, number)
        popen.wait(60)
    until(lambda: not marked(place), within=30)
    until(lambda: not list(place.glob("bg-test-*")), within=30)
    assert namespaces(testers) == []


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
