"""What the documents say is what is there."""

import re
from pathlib import Path

import psycopg
import pytest

from batchguard.core.settings import SETTING_NAMES, option_of
from batchguard.core.timing import Timing
from tests.fixtures.events import EVENTS
from tests.fixtures.guard import StartRun
from tests.fixtures.server import Server

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
    "file", ["README.md", "docs/safety.md", "docs/changelog.md", "docs/contributing.md", "docs/glossary.md"]
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
