"""The rules of the tree, each checked by the tool made for it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "tool",
    [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"], ["importlinter.cli"]],
    ids=["lint", "format", "types", "floors"],
)
def test_tool_is_content(tool: list[str]) -> None:
    """ruff, mypy --strict and the import linter find nothing."""
    name, *arguments = tool
    if name == "importlinter.cli":
        command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    else:
        command = [sys.executable, "-m", name, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
