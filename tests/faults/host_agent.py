"""A simulated host: one process that has imported everything, and forks a `batchguard` for every line it reads.

Reads `[id, [argument, …]]` as JSON lines from stdin; answers `[id, pid, null]` when a run has
started and `[id, pid, exit code]` when it has ended. After the end of stdin it waits for the rest.
"""

import json
import os
import select
import signal


def tell(number: int, pid: int, code: int | None) -> None:
    """Answer one line, as a whole."""
    os.write(1, json.dumps([number, pid, code]).encode() + b"\n")


def main() -> None:
    """Start what is asked for, and tell how it ended."""
    from batchguard.cli.app import main as run_command_line
    from batchguard.runtime import keeper  # imported here once instead of in every fork

    assert keeper
    null = os.open(os.devnull, os.O_RDWR)
    waking, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    runs: dict[int, int] = {}
    reading, pending = True, b""
    while reading or runs:
        ready, _, _ = select.select([waking, *([0] if reading else [])], [], [])
        if waking in ready:
            os.read(waking, 4096)
        if 0 in ready:
            data = os.read(0, 65536)
            reading = bool(data)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                number, argv = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for fd in (waking, wake):
                        os.close(fd)
                    for fd in (0, 1):
                        os.dup2(null, fd)
                    os._exit(run_command_line(argv))
                runs[pid] = number
                tell(number, pid, None)
        while runs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            tell(runs.pop(pid), pid, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
