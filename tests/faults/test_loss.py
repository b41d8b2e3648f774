"""What each event must lead to: real causes, one process fault at a time, and the two that are beyond the promise."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from batchguard.adapters import process_tree
from tests.fixtures.forkers import HOPPER
from tests.fixtures.guard import COMMAND, SHORT, Run, StartRun, clean_environment
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.server import PrivateServer, Server
from tests.fixtures.waiting import until
from tests.fixtures.watch import alive

ESCAPEES = "setsid sleep 600 & (setsid sh -c 'sleep 600 & sleep 600' &) ; (sleep 600 &) ; sleep 600"
"""A command whose tree has a session of its own, a double fork in another session, and an orphan in its group."""


def escaped(running: Run) -> list[int]:
    """Wait until the command of ESCAPEES has its whole tree, and give it: sh and five or six below it."""
    until(lambda: sum(_is_sleep(pid) for pid in running.tree()) == 5)
    return running.tree()


def _is_sleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")
    except OSError:
        return False


def watch_until_free(server: Server, pids: list[int]) -> list[int]:
    """Poll the lock until it is free, and give who has outlived it: must be nobody."""
    with server.connect(application_name="watcher") as watcher:
        query = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        deadline = time.monotonic() + 30
        while True:
            living = alive(pids)  # looked at before the lock: who dies in between does not count
            row = watcher.execute(query).fetchone()
            if row == (0,):
                return alive(pids)
            assert time.monotonic() < deadline, f"the lock is never free; alive: {living}"


def backend(server: Server) -> int:
    """Give the backend that holds the one lock."""
    return int(server.locks()[0][5])


LOST = r'batchguard: lost 100:1 in "\w+" on [\w.]+:\d+ after [\w.]+: the server ended our session \(%s\); '


@pytest.mark.event("our backend is terminated")
def test_backend_terminated(run: StartRun, server: Server) -> None:
    """pg_terminate_backend: TERM soon, everything dead, 76, one line."""
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES)
    tree = escaped(running)
    server.terminate_holder()
    assert running.code() == 76
    assert alive(tree) == []
    pattern = LOST % "57P01" + r"killed the command and \d processes, exit 76. Its work may be half done.\n"
    assert re.fullmatch(pattern, running.err)


@pytest.mark.event("our backend is terminated")
def test_shield_keeps_others_out_while_the_tree_dies(run: StartRun, server: Server) -> None:
    """After a terminated backend the key is taken again at once and held until the tree is dead."""
    script = "trap 'sleep 0.4; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    running = run("--key", "100:1", "--kill-after", "2", "--ttl", "12", "--", "sh", "-c", script)
    assert running.popen.stdout is not None
    running.popen.stdout.readline()
    old = backend(server)
    server.sql("SELECT pg_terminate_backend(%s)", old)
    until(lambda: [lock for lock in server.locks() if lock[5] != old])
    assert running.tree()
    assert server.sessions()[0][1] == "batchguard shield 100:1"
    assert running.code() == 76


@pytest.mark.event("our backend is terminated")
def test_who_queued_waits_until_the_lost_run_is_dead(run: StartRun, server: Server) -> None:
    """A run that queued has the lock the instant it is lost; its command starts only after the lost run's window."""
    stubborn = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    first = run("--key", "100:1", "--kill-after", "1.5", "--ttl", "10", "--", "sh", "-c", stubborn)
    assert first.popen.stdout is not None
    first.popen.stdout.readline()
    tree = first.tree()
    second = run("-v", "--key", "100:1", "--settle", "auto", "--wait", "60", "--", "echo", "second")
    until(lambda: [lock for lock in server.locks() if not lock[4]])
    server.sql("SELECT pg_terminate_backend(%s)", next(lock[5] for lock in server.locks() if lock[4]))
    assert second.popen.stdout is not None
    assert second.popen.stdout.readline() == b"second\n"
    assert alive(tree) == []
    assert first.code() == 76
    assert second.code() == 0
    assert "the run before did not give the lock back" in second.err


def test_who_queued_starts_at_once_when_the_lock_is_given_back(run: StartRun, server: Server) -> None:
    """A lock that is given back is taken over without settling."""
    first = run("--key", "100:1", "--", "sleep", "600")
    first.command()
    second = run("-v", "--key", "100:1", "--settle", "auto", "--wait", "60", "--", "true")
    until(lambda: [lock for lock in server.locks() if not lock[4]])
    first.popen.terminate()
    assert second.code() == 0
    assert "starting in" not in second.err
    assert first.code() == 128 + signal.SIGTERM


def test_a_queue_moves_on_without_settling(run: StartRun, server: Server) -> None:
    """Five runs at once, each waiting for its turn: every lock is given back, so nobody settles."""
    queue = [run("-v", "--key", "100:1", "--settle", "auto", "--wait", "60", "--", "sleep", "0.2") for _ in range(5)]
    assert [one.code() for one in queue] == [0] * 5
    assert [one.err for one in queue if "starting in" in one.err] == []


def test_who_queued_does_not_take_itself_for_a_rival(run: StartRun, server: Server) -> None:
    """While another run lives, takings are announced: a run hears its own too."""
    other = run("--key", "200:1", "--", "sleep", "600")
    other.command()
    test_who_queued_starts_at_once_when_the_lock_is_given_back(run, server)
    other.popen.terminate()
    other.code()


@pytest.mark.event("the server is restarted")
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_server_restarted(run: StartRun, private_server: PrivateServer, mode: str) -> None:
    """A restart, clean or not: everything dead, 76, one line."""
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES, dsn=private_server.dsn)
    tree = escaped(running)
    private_server.stop(mode)
    private_server.start()
    assert running.code() == 76
    assert alive(tree) == []
    assert re.match(LOST % "57P0[12]", running.err)


@pytest.mark.event("the server crashes")
def test_server_crashed(run: StartRun, private_server: PrivateServer) -> None:
    """A crash of the server: everything dead, 76."""
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES, dsn=private_server.dsn)
    tree = escaped(running)
    private_server.crash()
    assert running.code() == 76
    assert alive(tree) == []


@pytest.mark.event("unlocked behind our back")
def test_unlocked_behind_our_back(run: StartRun, server: Server, make_proxy: MakeProxy) -> None:
    """pg_advisory_unlock_all in our own session, as a careless pooler has it: found by the next check, 76."""
    proxy = make_proxy(server.host_and_port)
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES, dsn=f"{server.dsn} host=127.0.0.1 port={proxy.port}")
    tree = escaped(running)
    proxy.inject("SELECT pg_advisory_unlock_all()")
    assert running.code() == 76
    assert alive(tree) == []
    pattern = (
        r'batchguard: lost 100:1 in "\w+" on 127.0.0.1:\d+: the lock vanished while the session lived '
        r"\(pg_advisory_unlock_all or DISCARD ALL\?\); killed the command and \d processes, exit 76.\n"
    )
    assert re.fullmatch(pattern, running.err)


def test_a_cancelled_check_is_asked_again(run: StartRun, server: Server) -> None:
    """pg_cancel_backend does not cost a batch its life: the lock is still held."""
    running = run("--key", "100:1", "--", "sleep", "2")
    running.command()
    pid = backend(server)
    with server.connect() as psql:
        while running.popen.poll() is None:
            psql.execute("SELECT pg_cancel_backend(%s)", [pid])
            time.sleep(0.005)
    assert running.code() == 0
    assert running.err == ""


@pytest.mark.event("the network is silent")
def test_frozen_network(run: StartRun, server: Server, make_proxy: MakeProxy) -> None:
    """Silence: the tree is dead within the window, 76, and the line says what to check."""
    proxy = make_proxy(server.host_and_port)
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES, dsn=f"{server.dsn} host=127.0.0.1 port={proxy.port}")
    tree = escaped(running)
    begun = time.monotonic()
    proxy.freeze()
    until(lambda: not alive(tree))
    assert time.monotonic() - begun < 7.5
    assert running.code() == 76
    pattern = (
        r'batchguard: lost 100:1 in "\w+" on 127.0.0.1:\d+: no answer for 1s; killed the command and \d processes before the '
        r"server gives the lock up; exit 76. Check the network to 127.0.0.1.\n"
    )
    assert re.fullmatch(pattern, running.err)
    proxy.thaw()


def test_short_freezes_cost_nothing(run: StartRun, server: Server, make_proxy: MakeProxy) -> None:
    """Freezes shorter than the check timeout, one after the other, leave the batch alone."""
    proxy = make_proxy(server.host_and_port)
    timing = ("--check-interval", "0.2", "--check-timeout", "2", "--ttl", "12")
    running = run("--key", "100:1", *timing, "--", "sleep", "6", dsn=f"{server.dsn} host=127.0.0.1 port={proxy.port}")
    running.command()
    for _ in range(2):
        proxy.freeze()
        time.sleep(1.2)  # the cause itself: a freeze of this length
        proxy.thaw()
        time.sleep(0.3)
    assert running.code() == 0
    assert running.err == ""


@pytest.mark.event("the network is silent")
def test_connection_reset(run: StartRun, server: Server, make_proxy: MakeProxy) -> None:
    """A connection that breaks without a word is a loss too."""
    proxy = make_proxy(server.host_and_port)
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES, dsn=f"{server.dsn} host=127.0.0.1 port={proxy.port}")
    tree = escaped(running)
    proxy.cut()
    assert running.code() == 76
    assert alive(tree) == []
    assert re.match(LOST % "connection closed", running.err)


def test_command_that_ignores_term_is_killed(run: StartRun, server: Server) -> None:
    """After the grace comes KILL, also for what stopped itself."""
    script = "trap '' TERM; (kill -STOP $$ &); while :; do sleep 0.1; done"
    running = run("--key", "100:1", "--", "sh", "-c", script)
    tree = [running.command()]
    server.terminate_holder()
    assert running.code() == 76
    assert alive(tree) == []


@pytest.mark.event("guard killed")
def test_guard_killed(run: StartRun, server: Server) -> None:
    """Kill -9 of the guard: the keeper ends the tree, and only then is the lock free."""
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES)
    tree = escaped(running)
    os.kill(running.guard, signal.SIGKILL)
    assert watch_until_free(server, tree) == []
    assert running.code() == 76
    pattern = r'batchguard: guard process was killed; ended its command, then freed 100:1 in "\w+" on [\w.]+:\d+.\n'
    assert re.fullmatch(pattern, running.err)


@pytest.mark.event("keeper killed")
@pytest.mark.parametrize("inherit", ["--inherit-lock", "--no-inherit-lock"])
def test_keeper_killed(run: StartRun, server: Server, inherit: str) -> None:
    """Kill -9 of the keeper: the guard ends the tree while its duplicate of the socket holds the lock."""
    running = run("--key", "100:1", inherit, "--", "sh", "-c", ESCAPEES)
    tree = escaped(running)
    guard = running.guard
    os.kill(running.keeper, signal.SIGKILL)
    assert watch_until_free(server, tree) == []
    assert running.code() == -signal.SIGKILL
    until(lambda: not alive([guard]))
    pattern = (
        r"batchguard: lost 100:1: our own keeper process died; killed the command and \d processes before the lock went free, "
        r"exit 76. Out of memory\? See dmesg.\n"
    )
    assert re.fullmatch(pattern, running.err)


BROKEN_KEEPER = """
import sys
from batchguard.cli.app import main
from batchguard.runtime import keeper

def fail(self):
    if self.woke_at > self.locked_at + 1:
        raise RuntimeError("a fault of our own")
    return kept(self)

kept, keeper._Keeper.note_sleep = keeper._Keeper.note_sleep, fail
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.event("the run is refused")
def test_fault_of_our_own_in_the_keeper(server: Server) -> None:
    """Whatever goes wrong in the keeper, it does not end the session while the tree lives."""
    stubborn = "trap '' TERM; echo $$; while :; do sleep 0.1; done"
    argv = [
        sys.executable,
        "-c",
        BROKEN_KEEPER,
        "run",
        *SHORT,
        "--key",
        "100:1",
        "--no-inherit-lock",
        "--",
        "sh",
        "-c",
        stubborn,
    ]
    environment = clean_environment(BATCHGUARD_DSN=server.dsn)
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        command = int(popen.stdout.readline())
        assert watch_until_free(server, [command]) == []
        assert popen.wait(10) == 70
        assert popen.stderr is not None
        assert b"internal error in the keeper: RuntimeError: a fault of our own" in popen.stderr.read()


@pytest.mark.event("guard killed")
def test_guard_killed_before_the_command(run: StartRun, server: Server) -> None:
    """A guard killed while the lock settles: 76, and the line does not speak of a command that never was."""
    settling = run("-v", "--key", "100:1", "--settle", "30", "--", "echo", "ran")
    until(lambda: "starting in" in settling.err)
    os.kill(settling.guard, signal.SIGKILL)
    assert settling.code() == 76
    assert settling.err.endswith("guard process was killed before the command of 100:1 was started; exit 76.\n")
    assert settling.out == ""


def kill_guard_beside_a_stranger(server: Server, command: Sequence[str], below_guard: int) -> None:
    """`job & exec batchguard …`, and the guard killed once so many live below it: 76, and the job is spared."""
    argv = [*COMMAND, "run", *SHORT, "--key", "100:1", "--", *command]
    environment = clean_environment(BATCHGUARD_DSN=server.dsn)
    with subprocess.Popen(
        ["bash", "-c", f"sleep 77 & echo $!; exec {shlex.join(argv)}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as popen:
        assert popen.stdout is not None
        job = int(popen.stdout.readline())
        until(server.locks)
        guard = until(lambda: [pid for pid in process_tree.children(popen.pid) if process_tree.children(pid)])[0]
        until(lambda: len(process_tree.descendants(guard)) >= below_guard)
        os.kill(guard, signal.SIGKILL)
        assert popen.wait(10) == 76
        assert alive([job]) == [job]
        os.kill(job, signal.SIGKILL)


def test_children_that_were_there_before_us_are_spared(server: Server) -> None:
    """`job & exec batchguard …`: when the keeper has to kill, the caller's other job is not the batch."""
    kill_guard_beside_a_stranger(server, ["sleep", "600"], 1)


def kill_both(running: Run) -> None:
    """Kill keeper and guard as one: stopped first, so that neither sees the other go."""
    both = (running.keeper, running.guard)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in both:
            os.kill(pid, number)


@pytest.mark.event("both killed")
def test_both_killed(run: StartRun, server: Server) -> None:
    """Beyond the promise: the command dies with its guard, and the lock stays until its last process is gone."""
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES)
    tree = escaped(running)
    command = tree[0]
    kill_both(running)
    until(lambda: not alive([command]))
    survivors = alive(tree)
    assert survivors
    assert server.locks()
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not server.locks())


@pytest.mark.event("both killed")
def test_both_killed_and_descriptors_closed(run: StartRun, server: Server) -> None:
    """A process that closes what it did not open does not hold the lock: the last line of defence is gone with it."""
    script = "exec 9>&- 200>&-; setsid sleep 600 & sleep 600"
    running = run("--key", "100:1", "--", "bash", "-c", script)
    until(lambda: len(running.tree()) == 3)
    tree = running.tree()
    kill_both(running)
    until(lambda: not server.locks())
    survivors = alive(tree)
    assert survivors
    for pid in survivors:
        process_tree.send(pid, signal.SIGKILL)


@pytest.mark.event("both killed")
def test_both_killed_without_inherited_lock(run: StartRun, server: Server) -> None:
    """--no-inherit-lock gives that up: the lock is free though processes of the batch live."""
    running = run("--key", "100:1", "--no-inherit-lock", "--", "sh", "-c", ESCAPEES)
    tree = escaped(running)
    kill_both(running)
    until(lambda: not server.locks())
    for pid in alive(tree):
        process_tree.send(pid, signal.SIGKILL)


@pytest.mark.event("keeper stopped")
def test_keeper_stopped(run: StartRun, server: Server) -> None:
    """A keeper stopped past the deadline: the tree is dead and the lock free while it is stopped; then it exits 76."""
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES)
    tree = escaped(running)
    os.kill(running.keeper, signal.SIGSTOP)
    assert watch_until_free(server, tree) == []
    assert process_tree.inspect(running.keeper).state == "T"  # type: ignore[union-attr]  # it is there, stopped
    os.kill(running.keeper, signal.SIGCONT)
    assert running.code() == 76
    pattern = (
        r"batchguard: lost 100:1: this machine or process was stopped for [\w.]+, longer than the lock is safe; "
        r"killed the command and \d processes on waking, exit 76.\n"
    )
    assert re.fullmatch(pattern, running.err)


@pytest.mark.event("both stopped")
def test_both_stopped(run: StartRun, server: Server) -> None:
    """A suspended machine: the first act on waking is the kill."""
    running = run("--key", "100:1", "--", "sh", "-c", "trap '' TERM; " + ESCAPEES)
    tree = escaped(running)
    keeper, guard = running.keeper, running.guard
    for pid in (keeper, guard):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4)  # longer than the longest silence and the grace: no grace is left on waking
    assert alive(tree) == tree
    begun = time.monotonic()
    for pid in (guard, keeper):
        os.kill(pid, signal.SIGCONT)
    until(lambda: not alive(tree), every=0.001)
    assert time.monotonic() - begun < 0.5
    assert running.code() == 76
    assert "was stopped for" in running.err


@pytest.mark.event("guard stopped")
def test_guard_stopped(run: StartRun, server: Server) -> None:
    """A guard stopped for long: the lock is checked and held, and the batch goes on afterwards."""
    running = run("--key", "100:1", "--", "sh", "-c", "sleep 5; exit 3")
    running.command()
    os.kill(running.guard, signal.SIGSTOP)
    time.sleep(3.5)  # longer than the longest silence
    assert server.locks()
    os.kill(running.guard, signal.SIGCONT)
    assert (running.code(), running.err) == (3, "")


@pytest.mark.event("guard stopped")
def test_guard_stopped_and_lock_lost(run: StartRun, server: Server) -> None:
    """With the guard stopped, the keeper ends the batch after a loss."""
    running = run("--key", "100:1", "--", "sh", "-c", ESCAPEES)
    tree = escaped(running)
    os.kill(running.guard, signal.SIGSTOP)
    server.terminate_holder()
    assert running.code() == 76
    assert alive(tree) == []
    assert re.match(LOST % "57P01", running.err)


@pytest.mark.event("the lock turns out lost when it is given back")
def test_found_lost_when_unlocking(run: StartRun, server: Server, make_proxy: MakeProxy, tmp_path: Path) -> None:
    """A lock that the unlock finds gone, the command being over: one line, and the command's own exit code."""
    proxy = make_proxy(server.host_and_port)
    seldom = ("--check-interval", "30", "--check-timeout", "5", "--ttl", "60")
    script = f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 3"
    dsn = f"{server.dsn} host=127.0.0.1 port={proxy.port}"
    running = run("--key", "100:1", *seldom, "--", "sh", "-c", script, dsn=dsn)
    running.command()
    proxy.inject("SELECT pg_advisory_unlock_all()")
    (tmp_path / "go").touch()
    assert running.code() == 3
    pattern = (
        r'batchguard: 100:1 in "\w+" on 127.0.0.1:\d+ was found lost only after the command had ended \(exit 3\): '
        r"another run may have overlapped its last [\w.]+.\n"
    )
    assert re.fullmatch(pattern, running.err)


@pytest.mark.event("a loss while the lock rests")
def test_found_lost_after_the_command(run: StartRun, server: Server) -> None:
    """A loss that is found only by the unlock is said; the exit code stays the command's."""
    running = run("--key", "100:1", "--min-hold", "30", "--", "sh", "-c", "exit 3")
    until(server.locks)
    until(lambda: not running.tree())
    time.sleep(0.3)  # the command is over and rests; a tree not yet started looks the same
    server.terminate_holder()
    assert running.code() == 3
    pattern = (
        r'batchguard: 100:1 in "\w+" on [\w.]+:\d+ was found lost only after the command had ended \(exit 3\): '
        r"another run may have overlapped its last [\w.]+.\n"
    )
    assert re.fullmatch(pattern, running.err)


@pytest.mark.event("the server is restarted")
def test_settle_waits_after_a_restart(run: StartRun, private_server: PrivateServer) -> None:
    """auto: a command starts more than a window after a restart, since an old tree may still be dying."""
    _settles(run, private_server, lambda: private_server.restart("fast"))


@pytest.mark.event("the server crashes")
def test_settle_waits_after_a_crash(run: StartRun, private_server: PrivateServer) -> None:
    """auto: the same after a crash recovery, which leaves the postmaster's start as it was."""
    _settles(run, private_server, private_server.crash)


def _settles(run: StartRun, server: PrivateServer, cause: Callable[[], object]) -> None:
    server.sql("DO $$ BEGIN CREATE ROLE plain LOGIN; EXCEPTION WHEN duplicate_object THEN END $$")
    _grow_older_than_a_first_start(server)
    cause()
    ready = time.monotonic()
    script = "exec cut -d' ' -f1 /proc/uptime"
    started = run("-v", "--key", "100:1", "--settle", "auto", "--", "sh", "-c", script, dsn=f"{server.dsn} user=plain")
    assert started.code() == 0
    assert time.monotonic() - ready >= 7.5
    assert re.search(
        r"is ours; starting in [\d.]+s, because the server (was started|recovered from a crash)", started.err
    )


def _grow_older_than_a_first_start(server: PrivateServer) -> None:
    query = (
        "SELECT extract(epoch FROM clock_timestamp()) - (system_identifier >> 32) > 12 "
        "AND clock_timestamp() - pg_postmaster_start_time() > '6s' FROM pg_control_system()"
    )
    until(lambda: server.sql(query) == [(True,)], within=20, every=0.2)


def test_settle_does_not_wait_on_an_old_server_nor_on_a_new_one(run: StartRun, server: Server) -> None:
    """Auto costs nothing on a server that is up for long, nor on one that was born a moment ago."""
    started = run("-v", "--key", "100:1", "--settle", "auto", "--", "true")
    assert started.code() == 0
    assert "starting in" not in started.err


@pytest.mark.event("a signal before the command runs")
def test_settle_always(run: StartRun, server: Server) -> None:
    """always: every start waits for more than the window; a signal meanwhile ends it without a start."""
    settling = run("-v", "--key", "100:1", "--settle", "always", "--", "echo", "ran")
    until(lambda: "starting in 8s" in settling.err)
    assert server.locks()
    settling.popen.terminate()
    assert settling.code(3) == 128 + signal.SIGTERM
    assert settling.out == ""


def test_lost_while_settling(run: StartRun, server: Server) -> None:
    """A lock lost before the command starts: it never starts."""
    settling = run("-v", "--key", "100:1", "--settle", "30", "--", "echo", "ran")
    until(lambda: "starting in" in settling.err)
    server.terminate_holder()
    assert settling.code() == 76
    assert settling.out == ""
    assert "the command was not started" in settling.err


def test_window_of_short_timing() -> None:
    """The chain that these tests use is safe: its window is below its ttl."""
    values = dict(zip(SHORT[::2], SHORT[1::2], strict=True))
    window = 2 * float(values["--check-timeout"]) + float(values["--kill-after"]) + 5
    assert window < float(values["--ttl"])


@pytest.mark.event("guard stopped")
def test_guard_that_wakes_to_a_lock_and_its_loss(run: StartRun, server: Server) -> None:
    """Stopped while the keeper got the lock, continued after it was lost: the command never starts."""
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        options = ("--wait", "30", "--kill-after", "5", "--ttl", "20")
        waiting = run("--key", "100:1", *options, "--", "echo", "ran")
        until(lambda: [lock for lock in server.locks() if not lock[4]])
        guard = waiting.guard
        os.kill(guard, signal.SIGSTOP)
    lock = until(lambda: [lock for lock in server.locks() if lock[4]])[0]
    until(lambda: any("window_s" in query for _, _, query in server.sessions()))  # checked, so handed over
    server.sql("SELECT pg_terminate_backend(%s)", lock[5])
    until(lambda: server.sessions() and server.sessions()[0][1] == "batchguard shield 100:1")
    os.kill(guard, signal.SIGCONT)
    assert (waiting.code(), waiting.out) == (76, "")
    assert "the command was not started" in waiting.err


@pytest.mark.event("guard killed")
def test_hopper_beside_children_that_were_there_before_us(server: Server) -> None:
    """A tree that hops from fork to fork, beside a stranger: the lock is free only when it is really gone."""
    # What hopped on would be ours afterwards, and fail this test.
    kill_guard_beside_a_stranger(server, [sys.executable, "-S", "-c", HOPPER], 2)


@pytest.mark.event("our backend is terminated")
def test_shield_waits_for_a_key_that_is_held_for_a_moment(run: StartRun, server: Server) -> None:
    """Somebody else is quicker, and gives the key back while the tree is dying: the shield takes it then."""
    script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    running = run("--key", "100:1", "--kill-after", "4", "--ttl", "14", "--", "sh", "-c", script)
    assert running.popen.stdout is not None
    running.popen.stdout.readline()
    with server.connect() as psql:
        waiting = threading.Thread(target=psql.execute, args=["SELECT pg_advisory_lock(100, 1)"])
        waiting.start()
        until(lambda: [lock for lock in server.locks() if not lock[4]])
        server.sql("SELECT pg_terminate_backend(%s)", next(lock[5] for lock in server.locks() if lock[4]))
        waiting.join()
        until(lambda: [session for session in server.sessions() if session[1] == "batchguard shield 100:1"])
        psql.execute("SELECT pg_advisory_unlock(100, 1)")
    shield = until(lambda: [session[0] for session in server.sessions() if "shield" in session[1]])[0]
    until(lambda: [lock for lock in server.locks() if lock[5] == shield])
    assert running.tree()
    assert running.code() == 76


STUBBORN = ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")


@pytest.mark.event("our backend is terminated")
def test_shield_that_is_lost_too_is_raised_again(run: StartRun, server: Server) -> None:
    """The shield's own session is terminated while the tree is dying: a new one takes the key."""
    running = run("--key", "100:1", "--kill-after", "4", "--ttl", "14", "--", *STUBBORN)
    assert running.popen.stdout is not None
    running.popen.stdout.readline()
    ended: set[int] = set()
    for _ in range(3):
        [holder] = until(lambda: {lock[5] for lock in server.locks()} - ended)
        server.sql("SELECT pg_terminate_backend(%s)", holder)
        ended.add(holder)
    until(lambda: {lock[5] for lock in server.locks()} - ended)
    assert running.tree()
    assert running.code() == 76


@pytest.mark.event("unlocked behind our back")
def test_key_is_taken_again_on_the_session_that_lives(run: StartRun, server: Server, make_proxy: MakeProxy) -> None:
    """DISCARD ALL in our session: the same session takes the key again, with its settings, while the tree dies."""
    proxy = make_proxy(server.host_and_port)
    options = ("--key", "100:1", "--kill-after", "4", "--ttl", "14")
    running = run(*options, "--", *STUBBORN, dsn=f"{server.dsn} host=127.0.0.1 port={proxy.port}")
    assert running.popen.stdout is not None
    running.popen.stdout.readline()
    pid = backend(server)
    proxy.inject("DISCARD ALL")
    until(lambda: [lock for lock in server.locks() if lock[5] == pid])
    until(lambda: "try_advisory_lock" in server.sessions()[0][2] or not running.tree())
    assert running.tree()
    assert running.code() == 76


@pytest.mark.event("our backend is terminated")
def test_who_queued_beside_a_run_that_was_lost(run: StartRun, server: Server) -> None:
    """Of three, the first gives the lock back, the second gets it and is lost: the third waits for that one's end."""
    first = run("--key", "100:1", "--", "sleep", "600")
    first.command()

    def queue(*arguments: str) -> Run:
        before = sum(not lock[4] for lock in server.locks())
        queued = run("-v", "--key", "100:1", "--settle", "auto", "--wait", "60", *arguments)
        until(lambda: sum(not lock[4] for lock in server.locks()) == before + 1)
        return queued

    second = queue("--", "sh", "-c", "trap '' TERM; echo second; while :; do sleep 0.05; done")
    third = queue("--", "echo", "third")
    first.popen.terminate()
    assert second.popen.stdout is not None
    assert second.popen.stdout.readline() == b"second\n"
    tree = second.tree()
    server.sql("SELECT pg_terminate_backend(%s)", next(lock[5] for lock in server.locks() if lock[4]))
    assert third.popen.stdout is not None
    assert third.popen.stdout.readline() == b"third\n"
    assert alive(tree) == []
    assert third.code() == 0
    assert "the run before did not give the lock back" in third.err
    assert (first.code(), second.code()) == (143, 76)


def test_settling_reckons_with_the_tables_timing(start: StartRun, server: Server, tmp_path: Path) -> None:
    """A command line that tightens the timing does not shorten the wait for a run that did not."""
    table = tmp_path / "table.toml"
    timing = "check_interval = 0.2, check_timeout = 1, kill_after = 3, ttl = 12"
    table.write_text(f'[keys]\njob = {{ key = "100:1", {timing} }}\n')
    arguments = ("run", "-v", "--config", str(table), "--key", "job", "--settle", "always", "--kill-after", "0.5")
    settling = start(*arguments, "--", "echo", "ran")
    until(lambda: "starting in 10.5s" in settling.err or "starting in 11s" in settling.err or settling.popen.poll())
    assert "starting in" in settling.err
    settling.popen.terminate()
    assert settling.code() == 143
    assert "starting in 8s" not in settling.err
