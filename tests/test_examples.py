"""The examples, run."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from batchguard.adapters import process_tree
from tests.fixtures.guard import Run, StartRun, clean_environment
from tests.fixtures.server import Server
from tests.fixtures.waiting import until
from tests.fixtures.watch import alive

EXAMPLES = Path(__file__).parent.parent / "examples"
JDBC = Path("/usr/share/java/postgresql.jar")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def crontab_commands(file: Path) -> list[str]:
    """Give the commands of a crontab's lines."""
    return [
        re.split(r"\s+", line, maxsplit=5)[5] for line in file.read_text().splitlines() if re.match(r"[0-9*]", line)
    ]


def test_crontab_lines_are_accepted(start: StartRun, tmp_path: Path) -> None:
    """Each line of the crontab, with its batch in this folder's place, runs under its lock and says nothing more."""
    commands = crontab_commands(EXAMPLES / "crontab")
    assert len(commands) == 2
    for written in commands:
        short = written.replace("/var/log", str(tmp_path)).replace("--min-hold 50s ", "--min-hold 1s ")
        command = re.sub(r"/opt/batch/\w+\.sh", str(EXAMPLES / "daily_sales.sh"), short)
        ran = start(*shlex.split(command)[1:])
        assert ran.code() == 0
        assert ran.err == ""
        assert re.fullmatch(r"daily sales: run [0-9a-f-]{36}, token \d+\ndaily sales: done\n", ran.out)


@pytest.fixture
def environment(server: Server, table: str) -> dict[str, str]:
    """Give what a script finds: batchguard in its PATH, the database, the number table."""
    return clean_environment(PATH=PATH, BATCHGUARD_DSN=server.dsn, BATCHGUARD_CONFIG=table)


def test_maintenance_window(environment: dict[str, str], server: Server) -> None:
    """The work runs under the hold, which names it; afterwards the key is free; the work's exit code comes out."""
    soon = time.strftime("%H:%M:%S", time.localtime(time.time() + 60))
    script = EXAMPLES / "maintenance_window.sh"
    work = ["sh", "-c", "batchguard run --key daily_sales -- true; echo run exits $?; exit 3"]
    done = subprocess.run(
        [script, "daily_sales", soon, *work], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 3
    assert re.search(rf'on hold by \S+ until {soon} \w+: "maintenance: sh", since', done.stdout)
    assert "run exits 75" in done.stdout
    until(lambda: server.locks() == [])
    until(process_tree.reap)


def was_reaped(pid: int) -> bool:
    """Collect an orphan that has ended; False as long as it lives, or is not ours yet."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def test_maintenance_window_that_is_too_short(environment: dict[str, str], tmp_path: Path) -> None:
    """The hold ends by itself while the work goes on, and that is said."""
    soon = time.strftime("%H:%M:%S", time.localtime(time.time() + 4))
    script = EXAMPLES / "maintenance_window.sh"
    work = ["sh", "-c", "until batchguard status --key daily_sales --exit-code >/dev/null; do sleep 0.2; done; sleep 1"]
    said = tmp_path / "said"
    process = start_script([str(script), "daily_sales", soon, *work], environment, said)
    pid = until(lambda: re.search(r"kill (\d+) on this host", said.read_text()))
    assert pid is not None
    until(lambda: was_reaped(int(pid[1])))  # as init would
    assert process.wait(30) == 0
    assert "the window was closed before the work was done" in said.read_text()


def test_steps(run: StartRun) -> None:
    """All steps, while the lock is held."""
    ran = run("--key", "100:1", "--", str(EXAMPLES / "steps.sh"), env={"PATH": PATH, "STEP_SECONDS": "0.1"})
    assert ran.code() == 0
    assert ran.out == "extract\nload\nsend mail\n"


def lose(running: Run, server: Server) -> list[int]:
    """Stop batchguard, and let the server end its session: only the batch itself can notice; give its processes."""
    tree = running.tree()
    os.kill(running.guard, signal.SIGSTOP)
    os.kill(running.keeper, signal.SIGSTOP)
    server.terminate_holder()
    return tree


def wake(running: Run) -> int:
    """Let batchguard go on, and give the exit code."""
    guard = running.guard
    os.kill(running.keeper, signal.SIGCONT)
    process_tree.send(guard, signal.SIGCONT)
    return running.code()


def test_steps_end_without_the_lock(run: StartRun, server: Server, tmp_path: Path) -> None:
    """The lock is lost and batchguard is stopped: the next step does not begin."""
    out = tmp_path / "out"
    with out.open("wb") as stream:
        environment = {"PATH": PATH, "STEP_SECONDS": "2"}
        running = run("--key", "100:1", "--", str(EXAMPLES / "steps.sh"), env=environment, stdout=stream)
    until(lambda: out.read_text() == "extract\n")
    tree = lose(running, server)
    until(lambda: not alive(tree))
    assert out.read_text() == "extract\n"
    assert wake(running) == 76


@pytest.fixture(params=["DailySales", "MonthlyClose"])
def java(request: pytest.FixtureRequest, environment: dict[str, str], server: Server) -> list[str]:
    """Give the command of each crontab line in examples/java, and put what it needs into the environment."""
    if shutil.which("java") is None:
        pytest.skip("no java: apt-get install openjdk-17-jdk-headless")
    if request.param == "MonthlyClose" and not JDBC.exists():
        pytest.skip("no JDBC driver: apt-get install libpostgresql-jdbc-java")
    parts = conninfo_to_dict(server.dsn)
    login = "&".join(f"{name}={parts[name]}" for name in ("user", "password") if name in parts)
    environment["JDBC_URL"] = f"jdbc:postgresql://{parts['host']}:{parts['port']}/{parts['dbname']}?{login}"
    commands = crontab_commands(EXAMPLES / "java" / "crontab")
    scripts = [EXAMPLES / "java" / Path(command).name for command in commands]
    [script] = [script for script in scripts if f"{request.param}.java" in script.read_text()]
    return [str(script)]


def start_script(argv: list[str], environment: dict[str, str], out: Path) -> subprocess.Popen[bytes]:
    """Start a script as cron does; it becomes batchguard."""
    with out.open("wb") as stream:
        return subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)


def test_java_batch(java: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    """cron, bash, batchguard, java: all chunks, while the lock is held."""
    out = tmp_path / "out"
    assert start_script([*java, "2"], environment | {"CHUNK_MILLISECONDS": "100"}, out).wait(60) == 0
    assert out.read_text().splitlines()[-3:] == ["chunk 1 done", "chunk 2 done", "all done"]


def test_java_batch_ends_without_the_lock(
    java: list[str], environment: dict[str, str], server: Server, tmp_path: Path
) -> None:
    """The lock is lost and batchguard is stopped: java finds out by itself, and no chunk is finished after that."""
    out = tmp_path / "out"
    process = start_script([*java, "100"], environment | {"CHUNK_MILLISECONDS": "2000"}, out)
    try:
        until(lambda: "chunk 1 done" in out.read_text(), within=40)
        [guard] = process_tree.children(process.pid)
        tree = [one.pid for one in process_tree.living_descendants(guard)]
        for pid in (guard, process.pid):
            os.kill(pid, signal.SIGSTOP)
        done = out.read_text().count(" done")
        server.terminate_holder()
        until(lambda: not alive(tree))
        said = out.read_text()
        assert "stopped before the next chunk" in said or "rolled back" in said
        assert said.count(" done") <= done + 1
        for pid in (process.pid, guard):
            process_tree.send(pid, signal.SIGCONT)
        assert process.wait(30) == 76
    finally:
        for pid in [process.pid, *process_tree.descendants(process.pid)]:
            if process.poll() is None:
                process_tree.send(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_queue_tour(environment: dict[str, str], server: Server) -> None:
    """All that a job can go through, from a shell alone; nothing is left behind."""
    if shutil.which("psql") is None:
        pytest.skip("psql is not installed: apt-get install postgresql-client")
    done = subprocess.run(
        [EXAMPLES / "queue.sh"], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "lost job" in done.stderr
    lines = done.stdout.splitlines()
    assert '{"enqueued":100000,"duplicates":0}' in lines
    claimed = [json.loads(line)["payload"]["to"] for line in lines if '"claim_token"' in line]
    assert claimed == ["first@example.org", "app@example.org"]
    assert [line for line in lines if '"result"' in line or line.startswith("too late")] == [
        '{"id": 9, "result": "done"}',
        '{"id": 10, "result": "retrying"}',
        '{"id": 11, "result": "lost"}',
        "too late: exit 76",
        '{"id": 12, "result": "failed"}',
    ]
    assert re.search(r"^last_error +mailbox full$", done.stdout, re.MULTILINE)
    assert '{"retrying":1,"failed":0}' in lines
    assert '{"retried":1,"duplicates":0}' in lines
    assert '{"purged":100002}' in lines
    assert re.search(r"^mail +0 +0 +0 +0 +0 +0$", done.stdout, re.MULTILINE)
    assert server.sql("SELECT 1 FROM pg_namespace WHERE nspname = 'queue_tour'") == []
