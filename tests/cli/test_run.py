"""`batchguard run` from outside: a real process on a real server."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from batchguard.adapters import process_tree
from tests.fixtures.guard import COMMAND, SHORT, StartRun, StartStorm, clean_environment
from tests.fixtures.server import Server
from tests.fixtures.waiting import until


def test_command_runs_under_the_lock(run: StartRun, server: Server) -> None:
    """While the command runs, pg_locks shows its pair and the session says what it is."""
    running = run("--key", "100:1", "--", "sleep", "60")
    running.command()
    [(classid, objid, objsubid, mode, granted, pid)] = server.locks()
    assert (classid, objid, objsubid, mode, granted) == (100, 1, 2, "ExclusiveLock", True)
    [(session, application, query)] = server.sessions()
    assert session == pid
    assert application == f"batchguard run 100:1@{os.uname().nodename}"
    assert query.startswith('/* batchguard {"run_id":')
    running.popen.terminate()
    assert running.code() == 128 + signal.SIGTERM


@pytest.mark.event("the lock is held elsewhere")
def test_held_elsewhere_is_skipped_in_silence(run: StartRun, server: Server, tmp_path: Path) -> None:
    """Exit 75, nothing on stderr, no start; once psql leaves, the same line runs."""
    marker = tmp_path / "ran"
    with server.connect() as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        skipped = run("--key", "100:1", "--", "touch", str(marker))
        assert skipped.code() == 75
        assert skipped.err == ""
        assert not marker.exists()
    ran = run("--key", "100:1", "--", "touch", str(marker))
    assert ran.code() == 0
    assert marker.exists()


@pytest.mark.parametrize("code", [0, 3, 255])
def test_skip_code(run: StartRun, server: Server, code: int) -> None:
    """-E chooses the exit code of a skip."""
    with server.connect() as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        assert run("--key", "100:1", "-E", str(code), "--", "true").code() == code


@pytest.mark.slow
@pytest.mark.event("the command ends")
def test_every_exit_code_comes_through(storm: StartStorm) -> None:
    """A command's own exit codes, 0 to 255, are passed through."""
    runs = [["run", *SHORT, "--key", f"9:{n % 32}", "--wait", "60", "--", "sh", "-c", f"exit {n}"] for n in range(256)]
    for first in range(0, 256, 32):
        assert storm(runs[first : first + 32]).codes() == list(range(first, first + 32))


@pytest.mark.event("the command ends")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGALRM])
def test_death_by_signal(run: StartRun, number: int) -> None:
    """A command that signal n ended gives 128 + n."""
    assert run("--key", "100:1", "--", "sh", "-c", f"kill -{number} $$").code() == 128 + number


@pytest.mark.event("the command cannot be executed")
def test_not_found_and_not_executable(run: StartRun, tmp_path: Path) -> None:
    """127 and 126, as the shell and timeout(1) have them, with a line that names the command."""
    missing = run("--key", "100:1", "--", "no-such-command-here")
    assert missing.code() == 127
    path = os.environ["PATH"]
    assert missing.err == f"batchguard: cannot run no-such-command-here: not found in PATH={path}; exit 127.\n"
    words = run("--key", "100:1", "--", "echo hello")
    assert words.code() == 127
    assert "it is one word, and no shell is used. Write: -- sh -c" in words.err
    dos = tmp_path / "dos"
    dos.write_text("#!/bin/sh\r\ntrue\r\n")
    dos.chmod(0o755)
    odd = run("--key", "100:1", "--", str(dos))
    assert odd.code() == 127
    assert "the interpreter on its first line does not exist (or has DOS line ends); exit 127." in odd.err
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    refused = run("--key", "100:1", "--", str(plain))
    assert refused.code() == 126
    assert refused.err == f"batchguard: cannot run {plain}: Permission denied; exit 126.\n"


def test_script_without_interpreter_line(run: StartRun, tmp_path: Path) -> None:
    """A script that cron's shell would run runs here too: without #! it is given to /bin/sh."""
    script = tmp_path / "batch"
    script.write_text('echo "arguments: $*"\n')
    script.chmod(0o755)
    ran = run("--key", "100:1", "--", str(script), "a b", "c")
    assert ran.code() == 0
    assert ran.out == "arguments: a b c\n"


def test_arguments_arrive_untouched(run: StartRun) -> None:
    """Options of the command are not ours, bytes stay bytes, one leading -- is dropped and no more."""
    odd = os.fsdecode(b"\xff\xfe")
    ran = run("--key", "100:1", "--", "printf", "%s|", "-v", "--", "--key", odd, stdout=subprocess.PIPE)
    assert ran.code() == 0
    assert ran.popen.stdout is not None
    assert ran.popen.stdout.read() == b"-v|--|--key|\xff\xfe|"
    bare = run("--key", "100:1", "printf", "%s|", "-v", "x")
    assert bare.code() == 0
    assert bare.out == "-v|x|"


def test_stdin_belongs_to_the_command(run: StartRun, tmp_path: Path) -> None:
    """A loop that feeds lines to a guarded command does what it does without the guard."""
    text = tmp_path / "lines"
    text.write_text("one\ntwo\n")
    with text.open("rb") as lines:
        ran = run("--key", "100:1", "--", "cat", stdin=lines)
        assert ran.code() == 0
    assert ran.out == "one\ntwo\n"


def test_environment_of_the_command(run: StartRun, server: Server) -> None:
    """The command learns what it runs under; a nested environment of an outer run does not shine through."""
    ran = run("--key", "100:1", "--", "env", env={"BATCHGUARD_SLOT": "outer", "BATCHGUARD_NAME": "outer"})
    assert ran.code() == 0
    given = dict(line.split("=", 1) for line in ran.out.splitlines() if line.startswith("BATCHGUARD_"))
    assert given.keys() - {"BATCHGUARD_DSN"} == {
        "BATCHGUARD_KEY",
        "BATCHGUARD_RUN_ID",
        "BATCHGUARD_TOKEN",
        "BATCHGUARD_LOCK_PID",
        "BATCHGUARD_LOCK_SINCE",
        "BATCHGUARD_DATABASE",
        "BATCHGUARD_SYSTEM_ID",
        "BATCHGUARD_LOCK_DSN",
    }
    assert given["BATCHGUARD_KEY"] == "100:1"
    assert given["BATCHGUARD_DATABASE"] == server.sql("SELECT current_database()")[0][0]
    assert given["BATCHGUARD_SYSTEM_ID"] == str(server.sql("SELECT system_identifier FROM pg_control_system()")[0][0])
    assert "password" not in given["BATCHGUARD_LOCK_DSN"]


def test_variables_of_the_callers_own_come_through(server: Server) -> None:
    """NAME, TOKEN and the like are the caller's; under cron nothing is added to them, no LC_CTYPE either."""
    own = {"NAME": "a", "TOKEN": "b", "KEY": "c", "DATABASE": "d", "SLOT": "e", "PATH": os.environ["PATH"], "HOME": "/"}
    argv = [*COMMAND, "run", *SHORT, "--dsn", server.dsn, "--key", "100:1", "--", "env"]
    done = subprocess.run(argv, env=own, capture_output=True, text=True, check=True)
    given = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert {name: value for name, value in given.items() if not name.startswith("BATCHGUARD_")} == own


def test_fencing_token_grows(run: StartRun) -> None:
    """Each acquisition has a higher token than the one before."""
    tokens = []
    for _ in range(3):
        ran = run("--key", "100:1", "--", "printenv", "BATCHGUARD_TOKEN")
        assert ran.code() == 0
        tokens.append(int(ran.out))
    assert tokens == sorted(set(tokens))


def test_wait_until_the_lock_is_free(run: StartRun, server: Server) -> None:
    """--wait queues, and starts as soon as the holder leaves."""
    with server.connect() as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        waiting = run("--key", "100:1", "--wait", "60", "--", "echo", "ran")
        until(lambda: [lock for lock in server.locks() if not lock[4]])
    assert waiting.code() == 0
    assert waiting.out == "ran\n"


def test_a_person_is_told_what_a_wait_is_for(run: StartRun, server: Server) -> None:
    """With -v a wait says what it waits for, once."""
    with server.connect(application_name="psql") as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        waiting = run("-v", "--key", "100:1", "--wait", "5", "--", "true")
        until(lambda: "waiting for up to 5s for 100:1" in waiting.err)
        time.sleep(2.5)  # more than one slice of the queue
    assert waiting.code() == 0
    assert waiting.err.count("waiting") == 1


@pytest.mark.event("the lock is held elsewhere")
def test_wait_runs_out(run: StartRun, server: Server) -> None:
    """A wait that ran out is a skip."""
    with server.connect() as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        begun = time.monotonic()
        waiting = run("--key", "100:1", "--timeout", "2.5", "--", "true")
        assert waiting.code() == 75
        assert time.monotonic() - begun >= 2.5


def test_nonblock_beats_the_config(start: StartRun, server: Server, tmp_path: Path) -> None:
    """-n gives up at once though the number table says to wait."""
    table = tmp_path / "table.toml"
    table.write_text('[keys]\njob = { key = "100:1", wait = "forever" }\n')
    with server.connect() as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        assert start("run", "--config", str(table), "--key", "job", "-n", "--", "true").code() == 75


@pytest.mark.event("a signal before the command runs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_while_waiting(run: StartRun, server: Server, number: int) -> None:
    """A signal while waiting ends the wait at once, without a start."""
    with server.connect() as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        waiting = run("--key", "100:1", "--wait", "60", "--", "echo", "ran")
        until(lambda: [lock for lock in server.locks() if not lock[4]])
        begun = time.monotonic()
        waiting.popen.send_signal(number)
        assert waiting.code() == 128 + number
        assert time.monotonic() - begun < 1.5
        assert waiting.out == ""
        until(lambda: not [lock for lock in server.locks() if not lock[4]])


def test_shared_runs_go_together_and_exclude_an_exclusive_one(run: StartRun, server: Server) -> None:
    """Two --shared runs hold the lock at once; an exclusive run is skipped meanwhile."""
    first = run("--key", "100:1", "--shared", "--", "sleep", "60")
    second = run("--key", "100:1", "--shared", "--", "sleep", "60")
    first.command(), second.command()
    assert [lock[3] for lock in server.locks()] == ["ShareLock", "ShareLock"]
    assert run("--key", "100:1", "--", "true").code() == 75
    assert run("--key", "100:1", "--shared", "-x", "--", "true").code() == 75
    for running in (first, second):
        running.popen.terminate()
        running.code()


def test_range_gives_slots(run: StartRun) -> None:
    """A range is taken slot by slot; the command learns its slot; a run too many is skipped."""
    first = run("--key", "100:10..11", "--", "sh", "-c", "echo $BATCHGUARD_SLOT $BATCHGUARD_KEY; exec sleep 60")
    first.command()
    second = run("--key", "100:10..11", "--", "sh", "-c", "echo $BATCHGUARD_SLOT $BATCHGUARD_KEY; exec sleep 60")
    second.command()
    assert run("--key", "100:10..11", "--", "true").code() == 75
    for running in (first, second):
        running.popen.terminate()
        running.code()
    assert {first.out, second.out} == {"10 100:10\n", "11 100:11\n"}


def test_range_in_use_by_another_is_waited_for(run: StartRun, server: Server) -> None:
    """--wait on a range starts on the first slot that comes free."""
    with server.connect() as other, server.connect() as psql:
        other.execute("SELECT pg_advisory_lock(100, 10)")
        psql.execute("SELECT pg_advisory_lock(100, 11)")
        waiting = run("--key", "100:10..11", "--wait", "60", "--", "printenv", "BATCHGUARD_SLOT")
        until(server.sessions)
        psql.execute("SELECT pg_advisory_unlock(100, 11)")
        assert waiting.code() == 0
        assert waiting.out == "11\n"


def test_several_keys_all_or_nothing(run: StartRun, server: Server) -> None:
    """With one of two keys held, the run is skipped and leaves the other alone; the same key twice counts once."""
    with server.connect() as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 2)")
        assert run("--key", "100:2", "--key", "100:1", "--", "true").code() == 75
        assert [lock[1] for lock in server.locks()] == [2]
    running = run("--key", "100:2", "--key", "100:1", "--key", "100:1", "--", "sleep", "60")
    running.command()
    assert [lock[1] for lock in server.locks()] == [1, 2]
    running.popen.terminate()
    running.code()


@pytest.mark.slow
def test_several_keys_do_not_skip_each_other(storm: StartStorm, server: Server) -> None:
    """A run whose keys are all free runs, though others reach for some of them in vain at the same instant."""
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 3)")
        wanted = ["run", *SHORT, "--key", "100:2", "--key", "100:1", "--", "true"]
        in_vain = ["run", *SHORT, "--key", "100:2", "--key", "100:3", "--", "true"]
        for _ in range(5):
            assert storm([in_vain, in_vain, wanted, in_vain, in_vain]).codes() == [75, 75, 0, 75, 75]


def test_bigint_and_negative_keys(run: StartRun, server: Server) -> None:
    """The other number space, negative numbers and the ends of the range, as pg_locks shows them."""
    for key, shown in {
        "bigint:4711": (0, 4711, 1),
        "bigint:-1": (2**32 - 1, 2**32 - 1, 1),
        "-1:-2": (2**32 - 1, 2**32 - 2, 2),
        "2147483647:-2147483648": (2**31 - 1, 2**31, 2),
        "bigint:9223372036854775807": (2**31 - 1, 2**32 - 1, 1),
    }.items():
        running = run("--key", key, "--", "sleep", "60")
        running.command()
        assert [lock[:3] for lock in server.locks()] == [shown]
        running.popen.terminate()
        running.code()


def test_key_from_name(run: StartRun, server: Server) -> None:
    """--key-from-name takes the bigint that hashtextextended gives on the server."""
    running = run("--key-from-name", "日次売上", "--", "sleep", "60")
    running.command()
    expected = server.sql("SELECT (h >> 32) & 4294967295, h & 4294967295 FROM hashtextextended('日次売上', 0) AS h")[0]
    assert [lock[:3] for lock in server.locks()] == [(*expected, 1)]
    running.popen.terminate()
    running.code()


@pytest.mark.event("a signal while the command runs")
def test_term_is_forwarded_and_waited_for(run: StartRun, server: Server) -> None:
    """TERM reaches the command, which cleans up and exits 9; the lock is held until then."""
    script = "trap 'sleep 1; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    running = run("--key", "100:1", "--", "sh", "-c", script)
    assert running.popen.stdout is not None
    running.popen.stdout.readline()
    running.popen.terminate()
    time.sleep(0.5)  # in the middle of the clean-up
    assert server.locks()
    assert running.code() == 9


def test_term_reaches_a_job_in_a_session_of_its_own(run: StartRun) -> None:
    """`run -- setsid job`: the job is the batch though it is in no group of ours."""
    running = run(
        "--key",
        "100:1",
        "--",
        "setsid",
        "-f",
        "sh",
        "-c",
        "trap 'echo term; exit 0' TERM; echo ready; while :; do sleep 0.05; done",
    )
    assert running.popen.stdout is not None
    running.popen.stdout.readline()
    running.popen.terminate()
    assert running.code(5) == 0
    assert running.out == "term\n"


@pytest.mark.event("a signal while the command runs")
@pytest.mark.parametrize("to", ["keeper", "guard", "group"])
def test_signal_reaches_the_command_once(run: StartRun, to: str) -> None:
    """USR1 to the outer process, the inner one or all of the group arrives as one USR1."""
    script = "trap 'echo usr1' USR1; trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    running = run("--key", "100:1", "--", "sh", "-c", script, start_new_session=True)
    assert running.popen.stdout is not None
    running.popen.stdout.readline()
    if to == "group":
        os.killpg(running.keeper, signal.SIGUSR1)
    else:
        os.kill(running.keeper if to == "keeper" else running.guard, signal.SIGUSR1)
    assert running.popen.stdout.readline() == b"usr1\n"
    time.sleep(0.3)  # time for a second copy to arrive, were there one
    running.popen.terminate()
    assert running.code() == 0
    assert running.out == ""


def with_signal_ignored(name: str, server: Server, *command: str) -> "subprocess.Popen[bytes]":
    """Start a run as a child of a shell that ignores a signal."""
    argv = ["sh", "-c", f"trap '' {name}; exec \"$@\"", "sh", *COMMAND, "run", *SHORT, "--key", "100:1", "--", *command]
    return subprocess.Popen(argv, env=clean_environment(BATCHGUARD_DSN=server.dsn), stdout=subprocess.PIPE)


def test_caller_that_ignores_sigchld(server: Server) -> None:
    """With SIGCHLD ignored by the caller, the exit code still comes through."""
    with with_signal_ignored("CHLD", server, "sh", "-c", "exit 7") as popen:
        assert popen.wait(30) == 7


def test_nohup_stays_in_force(server: Server) -> None:
    """A HUP that the caller ignores stays ignored in the command, and does not end us."""
    script = "sed -n 's/SigIgn:\t//p' /proc/self/status; sleep 0.5"
    with with_signal_ignored("HUP", server, "sh", "-c", script) as popen:
        assert popen.stdout is not None
        ignored = int(popen.stdout.readline(), 16)
        popen.send_signal(signal.SIGHUP)
        assert popen.wait(30) == 0
    assert ignored >> (signal.SIGHUP - 1) & 1


def test_signal_state_is_the_callers(run: StartRun) -> None:
    """The command blocks and ignores nothing that its caller did not."""
    ran = run("--key", "100:1", "--", "sed", "-n", "s/^Sig\\(Ign\\|Blk\\):\t//p", "/proc/self/status")
    assert ran.code() == 0
    # Those that the C library keeps for itself (32 and 33) are nobody's; CPython 3.13 leaves them ignored.
    usable = sum(1 << number - 1 for number in signal.valid_signals())
    assert [int(line, 16) & usable for line in ran.out.split()] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_command_can_be_ended(run: StartRun, number: int) -> None:
    """A signal to a batch that somebody stopped ends it: CONT follows, as from timeout(1)."""
    running = run("--key", "100:1", "--", "sleep", "600")
    command = running.command()
    os.kill(command, signal.SIGSTOP)
    until(lambda: (process := process_tree.inspect(command)) and process.state == "T")
    running.popen.send_signal(number)
    assert running.code(5) == 128 + number


def test_min_hold_holds_after_a_time_limit(run: StartRun, server: Server) -> None:
    """The lock is kept for --min-hold however the command ended, unless it is lost."""
    begun = time.monotonic()
    limited = run("--key", "100:1", "--min-hold", "2", "--max-runtime", "0.2", "--", "sleep", "60")
    assert limited.code() == 124
    assert time.monotonic() - begun >= 2


@pytest.mark.event("the time limit is over")
def test_max_runtime(run: StartRun) -> None:
    """Over the limit: TERM, the message, 124."""
    limited = run("--key", "100:1", "--max-runtime", "0.3", "--", "sleep", "60")
    assert limited.code() == 124
    pattern = r"batchguard: killed 100:1's command: over --max-runtime 0.3s; ended by TERM after [\d.]+s; exit 124.\n"
    assert re.fullmatch(pattern, limited.err)


@pytest.mark.event("the time limit is over")
def test_max_runtime_ends_in_kill(run: StartRun) -> None:
    """A command that ignores TERM is killed after the grace."""
    limited = run(
        "--key", "100:1", "--max-runtime", "0.3", "--", "sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"
    )
    assert limited.code() == 124
    assert re.search(r"ended by KILL after (0\.[5-9]|[1-9][\d.]*)s", limited.err)


def test_first_signal_is_chosen(run: StartRun) -> None:
    """--signal USR2 is what the command gets first."""
    script = "trap 'echo usr2; exit 0' USR2; while :; do sleep 0.05; done"
    limited = run("--key", "100:1", "--max-runtime", "0.5", "--signal", "USR2", "--", "sh", "-c", script)
    assert limited.code() == 124
    assert limited.out == "usr2\n"


def test_min_hold(run: StartRun, server: Server) -> None:
    """The lock is kept for --min-hold though the command is over at once."""
    begun = time.monotonic()
    running = run("--key", "100:1", "--min-hold", "1.5", "--", "echo", "over")
    assert running.popen.stdout is not None
    assert running.popen.stdout.readline() == b"over\n"
    assert server.locks()
    assert running.code() == 0
    assert time.monotonic() - begun >= 1.5


@pytest.mark.event("a signal while the lock rests")
def test_signal_during_min_hold(run: StartRun, server: Server) -> None:
    """A signal ends the hold at once; the exit code is the command's."""
    running = run("--key", "100:1", "--min-hold", "60", "--", "sh", "-c", "echo over; exit 4")
    assert running.popen.stdout is not None
    running.popen.stdout.readline()
    until(lambda: not running.tree())
    running.popen.terminate()
    assert running.code(5) == 4


@pytest.mark.event("the command leaves processes behind")
@pytest.mark.parametrize(("mode", "lingers"), [("group", True), ("all", True), ("none", False)])
def test_background_job_of_the_group(run: StartRun, mode: str, lingers: bool, tmp_path: Path) -> None:
    """`job &` belongs to the batch, unless --wait-descendants none."""
    file = tmp_path / "pid"
    script = f"sleep 3 & echo $! > {file}; exit 5"
    done = run("--key", "100:1", "--wait-descendants", mode, "--", "sh", "-c", script, stdout=subprocess.DEVNULL)
    assert done.code() == 5
    job = process_tree.inspect(int(file.read_text()))
    assert (job is None or job.is_dead) is lingers


@pytest.mark.event("the command leaves processes behind")
def test_daemon_is_left_alone_by_default(run: StartRun, server: Server) -> None:
    """What left by setsid does not keep the batch, nor the lock, though it inherited the lock's socket."""
    script = "setsid sleep 2 & sleep 0.1"
    done = run("--key", "100:1", "--", "sh", "-c", script, stdout=subprocess.DEVNULL)
    assert done.code() == 0
    until(lambda: not server.locks(), within=1)
    until(lambda: not server.sessions(), within=1)


@pytest.mark.event("the command leaves processes behind")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--wait-descendants", "all", "--", "sh", "-c", "setsid sleep 1.5 & exit 0"],
        ["--", "setsid", "-f", "sleep", "1.5"],
    ],
)
def test_daemon_is_waited_for_when_asked(run: StartRun, arguments: list[str]) -> None:
    """--wait-descendants all waits for it; so does `run -- setsid job`, which is the job."""
    begun = time.monotonic()
    assert run("--key", "100:1", *arguments, stdout=subprocess.DEVNULL).code() == 0
    assert time.monotonic() - begun >= 1.5


def test_skip_names_the_holder(run: StartRun) -> None:
    """With -v a skip says who, since when and which backend."""
    running = run("--key", "100:1", "--", "sleep", "60")
    running.command()
    skipped = run("-v", "--key", "100:1", "--", "true")
    assert skipped.code() == 75
    host = os.uname().nodename
    pattern = (
        rf'batchguard: skipped 100:1 in "\w+" on [\w.]+:\d+: held by run 100:1@{host} since \d\d:\d\d:\d\d '
        r"\([\d.]+s, backend \d+\); exit 75."
    )
    assert re.fullmatch(pattern, skipped.err.splitlines()[-1])
    running.popen.terminate()
    running.code()


def test_warn_held_names_a_stranger(run: StartRun, server: Server) -> None:
    """With --warn-held a skip for something that is not batchguard is said even under cron."""
    with server.connect(application_name="DBeaver") as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        skipped = run("--key", "100:1", "--warn-held", "1h", "--", "true")
        assert skipped.code() == 75
        pattern = (
            r'batchguard: skipped 100:1 in "\w+" on [\w.]+:\d+: held for [\d.]+s by "DBeaver" \(user \w+\), '
            r"which is not batchguard. See: batchguard status --key 100:1\n"
        )
        assert re.fullmatch(pattern, skipped.err)


def test_warn_held_is_silent_for_a_young_run(run: StartRun) -> None:
    """A batchguard holder younger than --warn-held is no reason for mail; an older one is."""
    running = run("--key", "100:1", "--", "sleep", "60")
    running.command()
    young = run("--key", "100:1", "--warn-held", "1h", "--", "true")
    assert (young.code(), young.err) == (75, "")
    old = run("--key", "100:1", "--warn-held", "0", "--", "true")
    assert old.code() == 75
    assert "held by run" in old.err
    running.popen.terminate()
    running.code()


@pytest.mark.parametrize("wait", ["0", "forever"])
def test_run_inside_itself(run: StartRun, wait: str) -> None:
    """A run started inside a run of the same key says so without -v: it would skip, or wait, for ever."""
    inner = shlex.join(COMMAND)
    nested = run("--key", "100:1", "--", "sh", "-c", f"{inner} run --key 100:1 --wait {wait} -- echo never")
    assert nested.code() == 75
    pattern = (
        r"batchguard: skipped 100:1: this run was started inside a run of the same key \(run [0-9a-f-]{36}\), which holds it. "
        r"Use the guard once.\n"
    )
    assert re.fullmatch(pattern, nested.err)


def test_log_file_has_a_line_for_each_run(run: StartRun, server: Server, tmp_path: Path) -> None:
    """Runs and skips are appended, with every key of the format; the status file knows only real runs."""
    log, status = tmp_path / "log", tmp_path / "status"
    files = ("--log-file", str(log), "--status-file", str(status))
    assert run("--key", "100:1", *files, "--", "sh", "-c", "exit 3").code() == 3
    with server.connect(application_name="psql") as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        assert run("--key", "100:1", *files, "--", "true").code() == 75
    ran, skipped = map(json.loads, log.read_text().splitlines())
    assert json.loads(status.read_text()) == ran
    assert (
        ran.keys()
        == skipped.keys()
        == {
            *("v", "run_id", "key", "name", "slot", "database", "server", "host", "started_at", "ended_at", "outcome"),
            *("exit_code", "child_exit", "child_signal", "waited_s", "settled_s", "held_s", "lost_why"),
            *("lost_after_command", "holder", "token", "message"),
        }
    )
    assert (ran["outcome"], ran["exit_code"], ran["child_exit"], ran["key"]) == ("failed", 3, 3, ["100:1"])
    assert (skipped["outcome"], skipped["exit_code"]) == ("skipped", 75)
    assert skipped["holder"]["application"] == "psql"
    assert skipped["holder"]["by"] == "other"


def test_status_skips(run: StartRun, server: Server, tmp_path: Path) -> None:
    """--status-skips lets a skip replace the status file."""
    status = tmp_path / "status"
    with server.connect() as psql:
        psql.execute("SELECT pg_try_advisory_lock(100, 1)")
        assert run("--key", "100:1", "--status-file", str(status), "--status-skips", "--", "true").code() == 75
    assert json.loads(status.read_text())["outcome"] == "skipped"


def test_log_file_that_cannot_be_written(run: StartRun, tmp_path: Path) -> None:
    """A log that cannot be written is said, and changes nothing else."""
    done = run("--key", "100:1", "--log-file", str(tmp_path / "no" / "log"), "--", "sh", "-c", "exit 3")
    assert done.code() == 3
    assert "cannot write" in done.err


def test_log_file_that_nobody_reads(run: StartRun, tmp_path: Path) -> None:
    """A FIFO without a reader does not hold us up."""
    os.mkfifo(tmp_path / "fifo")
    done = run("--key", "100:1", "--log-file", str(tmp_path / "fifo"), "--", "sh", "-c", "exit 3")
    assert done.code() == 3
    assert "cannot write" in done.err


def test_log_format_json(run: StartRun) -> None:
    """--log-format json makes each line on stderr an object."""
    limited = run("--key", "100:1", "--log-format", "json", "--max-runtime", "0.2", "--", "sleep", "60")
    assert limited.code() == 124
    line = json.loads(limited.err)
    assert line["exit_code"] == 124
    assert line["key"] == "100:1"
    assert line["message"].startswith("killed 100:1's command")


def test_role_with_hostile_defaults(run: StartRun, server: Server, role: str) -> None:
    """Timeouts, isolation and read-only defaults of a role do not touch the session."""
    for default in (
        "default_transaction_isolation = serializable",
        "default_transaction_read_only = on",
        "statement_timeout = '1s'",
        "lock_timeout = '1s'",
        "idle_session_timeout = '1s'",
        "idle_in_transaction_session_timeout = '1s'",
        "synchronous_commit = off",
        "client_min_messages = error",
        "search_path = ''",
    ):
        server.sql(f"ALTER ROLE {role} SET {default}")
    dsn = f"{server.dsn} user={role} password=right"
    assert run("--key", "100:1", "--check-interval", "2.5", "--ttl", "12", "--", "sleep", "4", dsn=dsn).code() == 0


@pytest.mark.slow
def test_three_hundred_at_once(storm: StartStorm, server: Server) -> None:
    """A storm beyond the server's connections: one runs, all others are skipped, none hangs, nothing is left."""
    command = ["run", "--settle", "off", "--key", "7:7", "--", "sleep", "300"]
    started = storm([command] * 300)
    started.wait_until_left(1)
    assert len(server.locks()) == 1
    started.popen.terminate()
    assert sorted(started.codes()) == [75] * 299 + [128 + signal.SIGTERM]


@pytest.mark.event("a signal before the command runs")
@pytest.mark.parametrize("after", [0.0, 0.15, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.8])
def test_term_at_any_moment(run: StartRun, after: float) -> None:
    """TERM while starting, connecting, locking or spawning: either nothing was started, or it is ended too."""
    running = run("--key", "100:1", "--", "sleep", "600")
    time.sleep(after)  # the moment is what is tried
    running.popen.terminate()
    assert running.code(10) in (128 + signal.SIGTERM, -signal.SIGTERM)
