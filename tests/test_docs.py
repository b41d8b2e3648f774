"""What the documents say is what is there."""

import re
from pathlib import Path

import psycopg
import pytest

from batchguard.core.settings import SETTING_NAMES, option_of
from batchguard.core.timing import Timing
from tests.fixtures.events import EVENTS
from tests.fixtures.guard import COMMAND, StartRun, clean_environment
from tests.fixtures.server import Server
from tests.fixtures.terminal import Terminal
from tests.fixtures.waiting import until

ROOT = Path(__file__).parent.parent


def test_ci_runs_the_readmes_test_command() -> None:
    """One command line sets up and passes the tests, in the README and in CI."""
    [command] = [line for line in (ROOT / "README.md").read_text().splitlines() if "pytest" in line and "venv" in line]
    assert command in [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]


def test_links_lead_somewhere() -> None:
    """Every relative link in a document leads to a file."""
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_every_setting_is_an_option(start: StartRun) -> None:
    """Each setting of a config file has an option in the help of run."""
    shown = start("run", "--help")
    assert shown.code() == 0
    for name in SETTING_NAMES:
        assert option_of(name) in shown.out


@pytest.mark.parametrize(
    "file",
    [
        "README.md",
        "docs/safety.md",
        "docs/operations.md",
        "docs/queue.md",
        "docs/changelog.md",
        "docs/contributing.md",
        "docs/glossary.md",
    ],
)
def test_lines_fit_a_screen(file: str) -> None:
    """Prose is wrapped; only command lines and tables may be longer."""
    for line in (ROOT / file).read_text().splitlines():
        assert len(line) <= 120 or line.startswith(("python3 ", "|", "    ")), line


SAFETY = (ROOT / "docs" / "safety.md").read_text()


def test_safety_page_names_tests_that_exist() -> None:
    """Each test that the page names is there."""
    defined = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = set(re.findall(r"`(test_\w+)`", SAFETY))
    assert named - defined == set()


def test_safety_page_has_every_event() -> None:
    """The page's table is the list of events that tests cause, each row with a test that is marked with it."""
    table = SAFETY.partition("## What befalls a run")[2].partition("##")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    assert [row[0] for row in rows[1:]] == list(EVENTS)
    sources = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for event, *_, tests in rows[1:]:
        for name in re.findall(r"`(test_\w+)`", tests):
            [decorators] = re.findall(rf"((?:^@[^\n]*\n(?:^[ )\]][^\n]*\n)*)*)^def {name}\(", sources, re.MULTILINE)
            assert f'"{event}"' in decorators, f"{name} is not marked with: {event}"


def test_window_is_what_the_page_says() -> None:
    """The sum on the page is the default timing's."""
    timing = Timing()
    assert f"= {timing.window:g} s, and it must be less than --ttl, {timing.ttl:g} s" in SAFETY


def test_fence_of_the_safety_page(server: Server) -> None:
    """The worked example: an overtaken run is refused, and leaves nothing behind."""
    setup, use = re.findall(r"```sql\n(.*?)```", SAFETY, re.DOTALL)
    with server.connect() as connection:
        connection.execute("CREATE SCHEMA fenced; SET search_path = fenced")
        connection.execute("CREATE TABLE sales (day date, amount int); CREATE TABLE sales_by_day (day date, sum int)")
        connection.execute("INSERT INTO sales VALUES ('2026-11-30', 7)")
        connection.execute(setup)
        for token in (10, 12, 12):
            connection.execute(use.replace(":token", str(token)))
        with pytest.raises(psycopg.errors.RaiseException, match="a later run of daily_sales has been here"):
            connection.execute(use.replace(":token", "11"))
        connection.execute("ROLLBACK")
        assert connection.execute("SELECT count(*) FROM sales_by_day").fetchone() == (3,)
        connection.execute("DROP SCHEMA fenced CASCADE")


OPERATIONS = (ROOT / "docs" / "operations.md").read_text()

PARTICULARS = [
    (r"backend \d+", "backend N"),
    (r"\d{4}-\d\d-\d\d ", ""),
    (r"\d\d:\d\d:\d\d", "T"),
    (r"06:00 \w+", "06:00 Z"),
    (r"\([0-9.smhd]+\)", "(A)"),
    (r"\w+@\S+?(?=,| )", "W@H"),
    (r"host \S+", "host H"),
    (r"user \w+", "user U"),
    (r'of "\w+" on \S+', "of P"),
]
"""What differs between the page and a run of today."""


def general(text: str) -> str:
    """Take the particulars out of a capture."""
    for pattern, word in PARTICULARS:
        text = re.sub(pattern, word, text)
    return text


def rows_of_pipe(text: str) -> list[list[str]]:
    """Read what `status` writes into a pipe: lock, state and the sentence of each line."""
    lines = [line for line in text.splitlines() if re.match(r"(\d|bigint:)\S* .*  (held|waiting)  ", line)]
    return [re.split(r" {2,}", general(line), maxsplit=2) for line in lines]


def rows_of_table(text: str) -> list[list[str]]:
    """Read the table of a terminal: what is folded in a column belongs together."""
    header, *lines = text[text.index("LOCK") :].splitlines()
    starts = [header.index(name) for name in ("LOCK", "STATE", "BY")]
    rows: list[list[str]] = []
    for line in lines:
        if not line.strip():
            break
        cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        if cells[1]:
            rows.append(cells)
        else:
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], cells, strict=True)]
    return [[lock, state, general(by)] for lock, state, by in rows]


def test_status_looks_as_the_page_shows_it(
    start: StartRun, run: StartRun, server: Server, table: str, terminal: list[Terminal]
) -> None:
    """The captures, in a pipe and on 60 columns without colour, are what `status` prints for such locks."""
    running = run("--config", table, "--key", "daily_sales", "--", "sleep", "60")
    running.command()
    held = start("hold", "--config", table, "--key", "monthly_close", "--until", "06:00", "--reason", "DB移行")
    until(lambda: " is on hold" in held.err)
    waiting = run("--config", table, "--key", "daily_sales", "--wait", "1m", "--", "true")
    with server.connect(application_name="psql") as psql:
        psql.execute("SELECT pg_advisory_lock(4711)")
        piped = until(
            lambda: (
                rows_of_pipe(looked.out)
                if (looked := start("status", "--config", table)) and "waiting" in looked.out
                else None
            )
        )
        environment = clean_environment(BATCHGUARD_DSN=server.dsn, NO_COLOR="1", TERM="xterm")
        shell = f'stty cols 60; "$@" status --config {table}; echo; echo end'
        while True:
            terminal.append(Terminal(["sh", "-c", shell, "sh", *COMMAND], environment))
            until(lambda: terminal[-1].shows("end\r\n"))
            if "waiting" in terminal[-1].shown:  # between two slices nobody waits
                break
    pages, sixty = OPERATIONS.partition("here 60 columns")[::2]
    shown_table = "\n".join(line.removeprefix("    ") for line in sixty.partition("\n- ")[0].splitlines())
    assert rows_of_pipe("\n".join(line.strip() for line in pages.splitlines())) == piped
    assert rows_of_table(shown_table) == rows_of_table(terminal[-1].shown) == piped
    for one in (held, running):
        one.popen.terminate()
        one.code()
    assert waiting.code() == 0


def test_question_by_sql_of_the_page(run: StartRun, server: Server) -> None:
    """The SQL for programs with a connection of their own gives the right answers."""
    [sql] = re.findall(r"```sql\n(SELECT EXISTS.*?)```", OPERATIONS, re.DOTALL)
    running = run("--key", "100:1", "--", "sleep", "60")
    file = Path(f"/proc/{running.command()}/environ")
    until(lambda: "BATCHGUARD_LOCK_DSN=" in file.read_bytes().decode())
    environment = file.read_bytes().decode().split("\0")
    told = dict(variable.split("=", 1) for variable in environment if variable.startswith("BATCHGUARD_LOCK_"))
    asked = sql.replace(":lock_pid", told["BATCHGUARD_LOCK_PID"]).replace(
        ":lock_since", f"'{told['BATCHGUARD_LOCK_SINCE']}'"
    )
    assert server.sql(asked) == [(True,)]
    running.popen.terminate()
    running.code()
    assert server.sql(asked) == [(False,)]


def test_doctor_looks_as_the_page_shows_it(start: StartRun, table: str) -> None:
    """What is looked at, in that order."""
    shown = start("doctor", "--config", table)
    shown.code()
    listed = OPERATIONS.partition("# batchguard doctor\n")[2].partition("\n\n")[0]
    assert [line.split()[-1] for line in listed.splitlines() if "/proc" in line] == ["whole"]
    assert len(listed.splitlines()) == len(shown.out.splitlines()) - 1
    # The subjects differ, and so does what an ordinary role may do; the words in between are the same.
    for ours, page in zip(shown.out.splitlines()[1:], listed.splitlines(), strict=True):
        if page.strip().startswith("ok") and not re.search(r"\d", page):
            assert re.split(r" {2,}", ours)[2] == re.split(r" {2,}", page.strip())[2]
