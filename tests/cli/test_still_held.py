"""`batchguard still-held`, asked inside a batch."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from tests.fixtures.guard import COMMAND, Run, StartRun
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.server import PrivateServer, Server
from tests.fixtures.waiting import until

ASK = f"{sys.executable} -m batchguard still-held"


@pytest.fixture
def batch(run: StartRun, tmp_path: Path) -> Any:
    """Start a run whose batch waits for a file `go`, asks, and writes the answer and what was said."""

    def begin(*arguments: str, ask: str = ASK, **how: Any) -> Run:
        script = f"until test -e go; do sleep 0.05; done; {ask} 2>said; echo $? >code.new; mv code.new code; sleep 60"
        going = run(*arguments, "--", "sh", "-c", script, cwd=tmp_path, **how)
        going.command()
        return going

    return begin


def answer(tmp_path: Path) -> tuple[int, str]:
    """Let the batch ask; give the exit code and what was said."""
    (tmp_path / "go").touch()
    code = until(lambda: (tmp_path / "code").exists() and (tmp_path / "code").read_text(), within=40)
    return int(code), (tmp_path / "said").read_text()


def end(going: Run) -> None:
    """End a run, whatever has become of it."""
    going.popen.terminate()
    going.code()


@pytest.mark.parametrize("keys", [["100:1"], ["bigint:-1"], ["100:10..12"], ["100:1", "-1:-2"]])
def test_yes(batch: Any, tmp_path: Path, keys: list[str]) -> None:
    """0 and silent, for every kind of key."""
    going = batch(*(word for key in keys for word in ("--key", key)))
    assert answer(tmp_path) == (0, "")
    end(going)


def test_yes_shared(batch: Any, tmp_path: Path) -> None:
    """A shared lock is held too; with -v it is said."""
    going = batch("--key", "100:1", "--shared", ask=f"{ASK} -v")
    code, said = answer(tmp_path)
    assert code == 0
    assert said.endswith("batchguard: 100:1 is still held\n")
    end(going)


def freeze(going: Run) -> None:
    """Stop keeper and guard, so that neither can kill the batch."""
    os.kill(going.guard, signal.SIGSTOP)
    os.kill(going.keeper, signal.SIGSTOP)


def thaw(going: Run) -> None:
    """Let them go on; the batch is killed then."""
    os.kill(going.keeper, signal.SIGCONT)
    os.kill(until(lambda: going.guard), signal.SIGCONT)
    assert going.code() == 76


def test_no_after_the_session_ended(batch: Any, server: Server, tmp_path: Path) -> None:
    """The lock was lost and a frozen guard has not killed the batch yet: 76."""
    going = batch("--key", "100:1")
    freeze(going)
    server.terminate_holder()
    code, said = answer(tmp_path)
    assert code == 76
    assert "100:1 in " in said
    assert "is no longer held by this run: its session, backend " in said
    assert said.endswith(" has ended. Stop: another run may have started; exit 76.\n")
    thaw(going)


def test_no_after_an_unlock(batch: Any, server: Server, make_proxy: MakeProxy, tmp_path: Path) -> None:
    """The session lives and the lock is gone: 76."""
    proxy = make_proxy(server.host_and_port)
    going = batch("--key", "100:1", dsn=make_conninfo(server.dsn, host=proxy.host, port=proxy.port))
    freeze(going)
    proxy.inject("SELECT pg_advisory_unlock_all()")
    code, said = answer(tmp_path)
    assert code == 76
    assert "its session lives, but the lock is gone" in said
    thaw(going)


def test_no_after_a_restart(batch: Any, private_server: PrivateServer, tmp_path: Path) -> None:
    """No session outlives a restart, though its number may be given again."""
    going = batch("--key", "100:1", dsn=private_server.dsn)
    freeze(going)
    private_server.restart("fast")
    code, said = answer(tmp_path)
    assert code == 76
    assert "has ended" in said
    thaw(going)


def test_cannot_tell(batch: Any, private_server: PrivateServer, tmp_path: Path) -> None:
    """The database cannot be reached: 69 after the time for a check, and that is no yes."""
    going = batch("--key", "100:1", ask=f"{ASK} --check-timeout 1s", dsn=private_server.dsn)
    freeze(going)
    private_server.stop("immediate")
    code, said = answer(tmp_path)
    assert code == 69
    assert "cannot tell whether 100:1 is still held: cannot reach 127.0.0.1:" in said
    assert said.endswith(" (connection refused); exit 69. Stop, or ask again.\n")
    thaw(going)


def test_silent_server(batch: Any, server: Server, make_proxy: MakeProxy, tmp_path: Path) -> None:
    """No answer is no yes either; it takes no longer than it may."""
    proxy = make_proxy(server.host_and_port)
    going = batch(
        "--key",
        "100:1",
        ask=f"{ASK} --check-timeout 1s",
        dsn=make_conninfo(server.dsn, host=proxy.host, port=proxy.port),
    )
    freeze(going)
    proxy.freeze()
    code, said = answer(tmp_path)
    assert code == 69
    assert "no answer within 1s" in said
    proxy.thaw()
    os.kill(going.keeper, signal.SIGCONT)
    os.kill(going.guard, signal.SIGCONT)
    end(going)


def test_outside_a_run(start: StartRun) -> None:
    """It says what is missing, and what takes it away."""
    asked = start("still-held")
    assert asked.code() == 64
    assert asked.err.startswith(
        "batchguard: still-held is for a batch that `batchguard run` has started; BATCHGUARD_KEY, "
    )
    assert "sudo" in asked.err


@pytest.mark.parametrize(
    "variable", ["LOCK_PID=x", "KEY=' '", "KEY=daily_sales", "KEY=100:1..3", "KEY=100", "LOCK_DSN=nonsense"]
)
def test_strange_environment(batch: Any, tmp_path: Path, variable: str) -> None:
    """Variables that no run has written are no lock, and no yes."""
    going = batch("--key", "100:1", ask=f"BATCHGUARD_{variable} {ASK}")
    code, said = answer(tmp_path)
    assert code == 64
    assert "the BATCHGUARD_ variables are not as a run wrote them" in said
    end(going)


def test_another_role_that_may_not_see(batch: Any, server: Server, role: str, tmp_path: Path) -> None:
    """A role that cannot see when the session began cannot tell; it is said which right would do."""
    dsn = make_conninfo(server.dsn, user=role, password="right")
    going = batch("--key", "100:1", ask=f"BATCHGUARD_LOCK_DSN='{dsn}' {ASK}")
    code, said = answer(tmp_path)
    assert code == 77
    assert "GRANT pg_read_all_stats" in said
    end(going)


def test_password_is_found_where_the_run_found_it(batch: Any, server: Server, role: str, tmp_path: Path) -> None:
    """The environment has no password; BATCHGUARD_DSN has, or ~/.pgpass."""
    going = batch("--key", "100:1", dsn=make_conninfo(server.dsn, user=role, password="right"))
    assert answer(tmp_path) == (0, "")
    end(going)


def test_run_in_a_run(batch: Any, tmp_path: Path) -> None:
    """Inside a run of another key it is about the inner one."""
    inner = " ".join([*COMMAND, "run", "--settle", "off", "--key", "100:2", "--", *ASK.split(), "-v"])
    going = batch("--key", "100:1", ask=inner)
    code, said = answer(tmp_path)
    assert code == 0
    assert "batchguard: 100:2 is still held\n" in said
    end(going)
