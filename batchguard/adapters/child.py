"""The command as a child process: started as the caller would have, without a shell."""

import contextlib
import errno
import fcntl
import os
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchguard.core.exit_codes import ExitCode

_FIRST_LOCK_FD = 200
"""Above what scripts number by hand (`exec 9>lock`), so that the inherited socket is in nobody's way."""


TerminalSettings = list[Any]


@dataclass(frozen=True)
class Child:
    """A child that was forked; whether its exec worked is known once it has ended."""

    pid: int
    exec_error_fd: int

    def exec_error(self) -> tuple[int, str] | None:
        """Give the exit code and the reason when the exec failed; to be asked once, after the child ended."""
        try:
            report = os.read(self.exec_error_fd, 4096)
        finally:
            os.close(self.exec_error_fd)
        if not report:
            return None
        number = int(report)
        return exec_exit_code(number), os.strerror(number)


def exec_exit_code(number: int) -> ExitCode:
    """Give 127 for a command that is not there and 126 for one that cannot be executed, as shells do."""
    return ExitCode.NOT_FOUND if number in (errno.ENOENT, errno.ENOTDIR) else ExitCode.NOT_EXECUTABLE


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    *,
    lock_fd: int | None,
    prepare: Callable[[], None],
) -> Child:
    """Fork, and in the child: its own process group, `prepare`, the inherited lock, then exec.

    Args:
        argv: the command, bytes as they were given.
        environment: all of the command's environment.
        lock_fd: a socket that the command and all below it keep open, so that the lock lives as
            long as they do; None when they are not trusted with it.
        prepare: what else is to be done in the child, signals blocked.

    Raises:
        OSError: the fork failed.
    """
    error_read, error_write = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(error_read)
        os.close(error_write)
        raise
    if pid == 0:
        _become(argv, environment, lock_fd, prepare, error_write)
    os.close(error_write)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # the child does it too: whoever is first, nobody signals a group that is not there yet
    return Child(pid, error_read)


def _become(
    argv: Sequence[str], environment: Mapping[str, str], lock_fd: int | None, prepare: Callable[[], None], error_fd: int
) -> None:
    """Turn the forked child into the command; never returns."""
    number = errno.EINVAL
    try:
        os.setpgid(0, 0)
        if lock_fd is not None:
            _keep_open(lock_fd)
        prepare()
        execute(argv, environment)
    except OSError as error:
        number = error.errno or number
    finally:
        with contextlib.suppress(OSError):
            os.write(error_fd, str(number).encode())
        os._exit(ExitCode.NOT_FOUND)


def _keep_open(fd: int) -> None:
    """Duplicate a descriptor so that it survives exec; as low as a tight descriptor limit demands."""
    try:
        fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_LOCK_FD)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_DUPFD, 3)


def execute(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace this process by a command, found as execvp(3) finds it; returns never.

    A script without a `#!` line is given to /bin/sh, as shells and execvp(3) do.

    Raises:
        OSError: with the errno that says why: of all places in PATH, the most telling one.
    """
    program = argv[0]
    folders = [""] if "/" in program else os.get_exec_path(environment)
    telling = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for folder in folders:
        path = os.path.join(folder, program)
        try:
            os.execve(path, list(argv), environment)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                os.execve("/bin/sh", ["/bin/sh", path, *argv[1:]], environment)
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                telling = error
    raise telling


def caller_environment() -> dict[str, str]:
    """Give the environment as our caller set it.

    CPython adds LC_CTYPE where the locale is C, as under cron (PEP 538); Java and others would follow it.
    """
    environment = dict(os.environ)
    with contextlib.suppress(OSError):
        names = {entry.partition(b"=")[0] for entry in Path("/proc/self/environ").read_bytes().split(b"\0")}
        if b"LC_CTYPE" not in names:
            environment.pop("LC_CTYPE", None)
    return environment


def reserve_standard_descriptors() -> None:
    """Fill closed standard descriptors, so that none of our own becomes the command's stdout or our stderr.

    What is filled in is close-on-exec: the command finds closed what its caller had closed.
    """
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(fd)


def take_foreground() -> None:
    """Make this process's group the terminal's foreground; called with SIGTTOU blocked or ignored."""
    with contextlib.suppress(OSError):
        os.tcsetpgrp(0, os.getpgrp())


def terminal_settings() -> TerminalSettings | None:
    """Give how the terminal on stdin is set; None where it is none."""
    try:
        return termios.tcgetattr(0)
    except termios.error:
        return None


def restore_terminal(settings: TerminalSettings | None) -> None:
    """Set the terminal on stdin as it was."""
    if settings is not None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, settings)


def explain(program: str, code: int, why: str) -> str:
    """Say why a program could not be executed, with what usually is behind it."""
    if code != ExitCode.NOT_FOUND:
        return f"{program}: {why}"
    if os.path.exists(program):
        return f"{program}: the interpreter on its first line does not exist (or has DOS line ends)"
    if " " in program:
        return f"\"{program}\": {why}; it is one word, and no shell is used. Write: -- sh -c '…'"
    return f"{program}: {why}" if "/" in program else f"{program}: not found in PATH={os.environ.get('PATH', '')}"


def owns_foreground() -> bool:
    """Tell whether stdin is a terminal whose foreground our process group has."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
