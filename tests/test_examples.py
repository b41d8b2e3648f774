"""The examples, run."""

import re
import shlex
from pathlib import Path

from tests.fixtures.guard import StartRun

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_crontab_lines_are_accepted(start: StartRun, tmp_path: Path) -> None:
    """Each line of the crontab, with its batch in this folder's place, runs under its lock and says nothing more."""
    lines = [line for line in (EXAMPLES / "crontab").read_text().splitlines() if " batchguard run " in line]
    assert len(lines) == 2
    for line in lines:
        command = re.split(r"\s+", line, maxsplit=5)[5]
        command = command.replace("/var/log", str(tmp_path)).replace("--min-hold 50s ", "--min-hold 1s ")
        command = re.sub(r"/opt/batch/\w+\.sh", str(EXAMPLES / "daily_sales.sh"), command)
        ran = start(*shlex.split(command)[1:])
        assert ran.code() == 0
        assert ran.err == ""
        assert re.fullmatch(r"daily sales: run [0-9a-f-]{36}, token \d+\ndaily sales: done\n", ran.out)
