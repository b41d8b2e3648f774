"""What the documents say is what is there."""

import re
from pathlib import Path

import pytest

from batchguard.core.settings import SETTING_NAMES, option_of
from tests.fixtures.guard import StartRun

ROOT = Path(__file__).parent.parent


def test_ci_runs_the_readmes_test_command() -> None:
    """One command line sets up and passes the tests, in the README and in CI."""
    [command] = [line for line in (ROOT / "README.md").read_text().splitlines() if "pytest" in line and "venv" in line]
    assert command in [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]


def test_links_lead_somewhere() -> None:
    """Every relative link in a document leads to a file."""
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


def test_every_setting_is_an_option(start: StartRun) -> None:
    """Each setting of a config file has an option in the help of run."""
    shown = start("run", "--help")
    assert shown.code() == 0
    for name in SETTING_NAMES:
        assert option_of(name) in shown.out


@pytest.mark.parametrize("file", ["README.md", "docs/changelog.md", "docs/contributing.md", "docs/glossary.md"])
def test_lines_fit_a_screen(file: str) -> None:
    """Prose is wrapped; only command lines and tables may be longer."""
    for line in (ROOT / file).read_text().splitlines():
        assert len(line) <= 120 or line.startswith(("python3 ", "|", "    ")), line
