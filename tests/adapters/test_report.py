"""Lines on stderr, the log file, the status file."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from batchguard.adapters import report

SAY = "from batchguard.adapters.report import say; say('日本語')"


def test_a_full_pipe_does_not_block() -> None:
    """A stderr that nobody reads does not hold us up."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    try:
        while True:
            os.write(write_end, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write_end, True)
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", SAY], stderr=write_end, check=True)
    assert time.monotonic() - begun < 10
    os.close(read_end)
    os.close(write_end)


def test_a_broken_pipe_and_a_full_disk_are_borne() -> None:
    """Neither ends the process."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    subprocess.run([sys.executable, "-c", SAY], stderr=write_end, check=True)
    os.close(write_end)
    with Path("/dev/full").open("wb") as full:
        subprocess.run([sys.executable, "-c", SAY], stderr=full, check=True)


def test_text_in_any_language_and_locale() -> None:
    """UTF-8 whatever the locale says; cron's is C."""
    done = subprocess.run(
        [sys.executable, "-c", SAY], env={**os.environ, "LC_ALL": "C"}, capture_output=True, check=True
    )
    assert done.stderr == "batchguard: 日本語\n".encode()


def test_log_lines_never_mix(tmp_path: Path) -> None:
    """Many writers at once leave whole lines."""
    file = str(tmp_path / "log")

    def write(number: int) -> None:
        for _ in range(50):
            assert report.append_line(file, {"n": number, "filler": "x" * 3000}) is None

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = Path(file).read_text().splitlines()
    assert len(lines) == 400
    assert all(json.loads(line) for line in lines)


def test_status_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A failed replacement leaves the old file and no litter; a good one is readable by others."""
    file = tmp_path / "status"
    assert report.replace_file(str(file), {"a": 1}) is None
    assert json.loads(file.read_text()) == {"a": 1}
    assert file.stat().st_mode & 0o777 == 0o644
    assert report.replace_file(str(tmp_path / "no" / "status"), {}) == "No such file or directory"
    assert [path.name for path in tmp_path.iterdir()] == ["status"]
