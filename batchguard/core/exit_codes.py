"""The exit codes that batchguard adds to those of the command it runs."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What a caller can tell apart without reading a message.

    64 to 78 are those of BSD's sysexits.h; 124, 126 and 127 those of timeout(1) and the shell.
    """

    OK = 0
    FINDINGS = 1
    NOTHING_CLAIMABLE = 3
    DUPLICATE = 5
    USAGE = 64
    UNREACHABLE = 69
    SOFTWARE = 70
    SKIPPED = 75
    LOST = 76
    NO_PERMISSION = 77
    CONFIG = 78
    TIME_LIMIT = 124
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


def exit_code_of_signal(number: int) -> int:
    """Give the exit code a shell reports for a process that signal `number` ended: 128 + n."""
    return 128 + number
