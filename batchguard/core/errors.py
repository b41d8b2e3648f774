"""Errors a user can cause or meet; each carries the exit code it leads to."""

from typing import ClassVar

from batchguard.core.exit_codes import ExitCode


class BatchguardError(Exception):
    """Something a user must be told in one line; `str(error)` is that line without the prefix."""

    exit_code: ClassVar[ExitCode] = ExitCode.SOFTWARE
    log_format: str = "text"
    """How the line is to be written, where the settings say so."""


class UsageError(BatchguardError):
    """The command line itself is wrong."""

    exit_code = ExitCode.USAGE


class UnreachableError(BatchguardError):
    """The database cannot be reached, or does not answer."""

    exit_code = ExitCode.UNREACHABLE


class SystemLimitError(BatchguardError):
    """The system has no process, descriptor or memory left for us; it may have again in a minute."""

    exit_code = ExitCode.UNREACHABLE


class RightsError(BatchguardError):
    """The server refused the login, or the role lacks a right."""

    exit_code = ExitCode.NO_PERMISSION


class ConfigError(BatchguardError):
    """A setting, a key, or the kind of server makes guarding impossible or unsafe."""

    exit_code = ExitCode.CONFIG


class TableError(ConfigError):
    """A key, or a line of the number table, is wrong; who prints it adds the exit code."""


class SignalReceived(BaseException):
    """A signal that ends us, as Ctrl-C does: with time to give back what is ours; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
