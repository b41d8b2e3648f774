"""`batchguard local` and `--local`: an embedded server of one's own.

For an ordinary user all is below the XDG data folder. For root it is below /var/lib/batchguard and
has an account: the test gets a mount namespace of its own, with an empty /var/lib and a copy of /etc.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchguard.adapters import process_tree
from tests.fixtures.guard import COMMAND, clean_environment

Local = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    """Run command lines that have an embedded server of their own, in a place of their own."""
    environment = clean_environment(XDG_DATA_HOME=str(tmp_path / "data"), XDG_CONFIG_HOME=str(tmp_path / "xdg"))
    enter = _namespace(tmp_path) if os.geteuid() == 0 else []

    def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [*enter, *COMMAND, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    yield call
    call("local", "destroy", "--yes")
    if enter:
        holder = int(enter[2])
        process_tree.send(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def _namespace(tmp_path: Path) -> list[str]:
    """Make a mount namespace that lives as long as a process of ours, and give the words that enter it."""
    etc = tmp_path / "etc"
    shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
    script = f"mount -t tmpfs -o mode=755 none /var/lib && mount --bind {etc} /etc && echo ready && exec sleep 600"
    arguments = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    holder = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    holder.returncode = 0  # its end is waited for by pid
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n"
    holder.stdout.close()
    return ["nsenter", "--target", str(holder.pid), "--mount"]


def test_first_try(local: Local) -> None:
    """The README's first line: an embedded server is set up, and the batch runs without settling."""
    first = local("run", "--local", "--key", "100:1", "--", "sh", "-c", "echo the batch ran; env | grep BATCHGUARD_")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("the batch ran\n")
    assert "BATCHGUARD_KEY=100:1\n" in first.stdout
    again = local("run", "--local", "--key", "100:1", "--", "true")
    assert (again.returncode, again.stderr) == (0, "")


def test_life_of_a_server(local: Local) -> None:
    """start, status, dsn, psql, stop, destroy: each does what it says, twice over."""
    assert local("local", "status").returncode == 1
    for _ in range(2):
        started = local("local", "start")
        assert started.returncode == 0, started.stderr
        assert started.stdout.startswith("running: host=")
    status = local("local", "status")
    assert status.returncode == 0
    assert "this user on this machine only" in status.stdout
    dsn = local("local", "dsn").stdout.strip()
    assert started.stdout.strip() == f"running: {dsn}"
    asked = local("local", "psql", "-Atc", "SELECT current_setting('listen_addresses') = ''")
    assert asked.stdout == "t\n", asked.stderr
    assert local("local", "stop").stdout == "stopped\n"
    assert local("local", "stop").stdout == "it was not running\n"
    assert local("local", "status").returncode == 1
    assert local("local", "destroy").returncode == 64
    assert local("local", "destroy", "--yes").stdout == "removed\n"


def test_first_starts_at_once(local: Local) -> None:
    """Several first starts at once set up one server."""
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: local("run", "--local", "--wait", "30", "--key", "1:1", "--", "true"), range(4)))
    assert [one.returncode for one in done] == [0] * 4, [one.stderr for one in done]
    ids = {local("local", "psql", "-Atc", "SELECT system_identifier FROM pg_control_system()").stdout for _ in range(2)}
    assert len(ids) == 1
