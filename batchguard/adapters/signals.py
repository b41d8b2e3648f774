"""Signals: taking over what the caller left, waiting for them, and handing the caller's state to the command.

Nothing is done in a handler. The C handler of CPython writes the number into a pipe
(`signal.set_wakeup_fd`), which the loop reads like any other descriptor.
"""

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""What a user sends to end, reload or ask a batch; passed on to the command."""

TERMINAL_STOPS = (signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP)
"""What a terminal sends to stop a job; a guard that is stopped cannot guard."""

SET_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""CPython ignores these from its start, so what the caller had is not known; the command gets the default."""


@dataclass(frozen=True)
class CallerSignals:
    """What the process that started us had ignored and blocked."""

    ignored: frozenset[int]
    blocked: frozenset[int]


def take_over() -> CallerSignals:
    """Note the caller's signal state, then make ours sound; every signal stays blocked until `SignalPipe`.

    With SIGCHLD ignored the kernel reaps children itself and their exit codes are lost; with TERM
    blocked nothing could end us.
    """
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in TERMINAL_STOPS:
        signal.signal(number, signal.SIG_IGN)
    return CallerSignals(frozenset(ignored - set(SET_BY_PYTHON)), frozenset(blocked))


def give_back(caller: CallerSignals, and_ignore: Iterable[int] = ()) -> None:
    """In the child, before exec: what the caller ignored and blocked, and defaults for the rest."""
    ignored = caller.ignored | set(and_ignore)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        wanted = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if signal.getsignal(number) is not wanted:
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, caller.blocked)


def die_of(number: int) -> None:
    """End this process by a signal, so that its parent sees that and not an exit code."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class SignalPipe:
    """Signals as something to read; what the caller had ignored (nohup's HUP) stays ignored."""

    def __init__(self, caller: CallerSignals, numbers: Iterable[int]) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in numbers:
            if number not in caller.ignored or number == signal.SIGCHLD:
                signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def fileno(self) -> int:
        """Give the descriptor that becomes readable with a signal."""
        return self._read_fd

    def read(self) -> list[int]:
        """Give the signals that came since the last call, in their order."""
        try:
            return list(os.read(self._read_fd, 4096))
        except BlockingIOError:
            return []


class AllBlocked:
    """Context manager: no signal is delivered inside, so that a fork and its pid belong together."""

    def __enter__(self) -> None:
        """Block everything."""
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def __exit__(self, *_: object) -> None:
        """Go back to what was blocked before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
