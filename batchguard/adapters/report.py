"""What leaves the product besides the command's own output: lines on stderr, the log file, the status file."""

import contextlib
import json
import os
import select
import stat
import syslog
import tempfile
from collections.abc import Mapping
from typing import Any

from batchguard.adapters.clock import wall_time

_STDERR = 2
_PIPE_BUF = 4096
_PATIENCE_MS = 200


_system_log = False


def leave_terminal() -> None:
    """Close what ties us to a terminal; lines go on to stderr where that is a file, else to the system's log."""
    global _system_log  # noqa: PLW0603 -- a process has one stderr, and this is what became of it
    is_file = stat.S_ISREG(os.fstat(_STDERR).st_mode)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1) if is_file else (0, 1, _STDERR):
        os.dup2(nowhere, fd)
    os.close(nowhere)
    _system_log = not is_file


def say(message: str, log_format: str = "text", **facts: Any) -> None:
    """Write one line to stderr; given up when nobody can take it.

    A write to a pipe whose reader sleeps, or to a stopped terminal, would block us for ever. poll(2)
    tells beforehand, and up to PIPE_BUF bytes then go at once (pipe(7)).
    """
    if log_format == "json":
        line = json.dumps({"time": timestamp(), "message": message, **facts}, ensure_ascii=False)
    else:
        line = f"batchguard: {message}"
    if _system_log:
        syslog.openlog("batchguard", syslog.LOG_PID)
        syslog.syslog(syslog.LOG_WARNING, message)
        return
    try:
        data = line.encode("utf-8", "surrogateescape")  # a file name comes out as the bytes it is
    except UnicodeEncodeError:
        data = line.encode("utf-8", "backslashreplace")  # half a pair in somebody's JSON is none
    data = data[: _PIPE_BUF - 1] + b"\n"
    poll = select.poll()
    poll.register(_STDERR, select.POLLOUT)
    with contextlib.suppress(OSError):
        if poll.poll(_PATIENCE_MS):
            os.write(_STDERR, data)


def write_all(fd: int, data: bytes) -> None:
    """Write to a descriptor until all is out; one that takes nothing just now is waited for.

    Raises:
        OSError: the reader has gone, or there is no room.
    """
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])


def is_terminal() -> bool:
    """Tell whether a person reads stderr."""
    return os.isatty(_STDERR)


def timestamp() -> str:
    """Give the local time as RFC 3339 with its offset."""
    return wall_time().isoformat(timespec="milliseconds")


def append_line(file: str, record: Mapping[str, Any]) -> str | None:
    """Append one JSON line in one write, so that lines of several runs never mix; give the reason if it fails.

    O_NONBLOCK: a FIFO that nobody reads is an error, not a wait.
    """
    data = json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"
    try:
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
    except OSError as error:
        return error.strerror
    return None


def replace_file(file: str, record: Mapping[str, Any]) -> str | None:
    """Replace a file by one JSON object, atomically: a reader sees the old or the new one; give why it failed."""
    folder, name = os.path.split(os.path.abspath(file))
    temporary = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as stream:
            json.dump(record, stream, ensure_ascii=False)
            stream.write("\n")
            os.fchmod(fd, 0o644)
        os.replace(temporary, file)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return error.strerror
    return None
