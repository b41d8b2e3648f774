"""The settings of a run: what a command line, a key's table and `[defaults]` may say, and what is built in."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal

from batchguard.core.durations import FOREVER, parse_duration
from batchguard.core.errors import ConfigError, UsageError
from batchguard.core.exit_codes import ExitCode
from batchguard.core.guard import Linger
from batchguard.core.settle import Settle
from batchguard.core.timing import Timing

LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class RunSettings:
    """Every setting that has an option of `run` and a key in the config file; durations in seconds."""

    wait: float = 0.0
    shared: bool = False
    skip_code: int = ExitCode.SKIPPED
    check_interval: float = 5.0
    check_timeout: float = 20.0
    kill_after: float = 10.0
    ttl: float = 60.0
    settle: Settle = "auto"
    signal: int = signal.SIGTERM
    max_runtime: float = inf
    min_hold: float = 0.0
    warn_held: float = inf
    wait_descendants: Linger = Linger.GROUP
    inherit_lock: bool = True
    connect_timeout: float = 10.0
    connect_retry: float = 0.0
    allow_pooler: bool = False
    status_file: str | None = None
    status_skips: bool = False
    log_file: str | None = None
    log_format: LogFormat = "text"

    @property
    def timing(self) -> Timing:
        """The four numbers of the timing chain."""
        return Timing(self.check_interval, self.check_timeout, self.kill_after, self.ttl)


def read_duration(value: Any) -> float:
    """Read a duration of a command line or a config file (seconds).

    Raises:
        UsageError: it is none, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(f"{value!r} is not a duration")
    seconds = parse_duration(value) if isinstance(value, str) else float(value)
    if not 0 <= seconds < inf:
        raise UsageError("a duration is neither negative nor endless")
    return seconds


def read_positive_duration(value: Any) -> float:
    """Read a duration that is longer than nothing (seconds).

    Raises:
        UsageError: it is none, negative or 0.
    """
    seconds = read_duration(value)
    if seconds == 0:
        raise UsageError("0 is no time at all; leave it out instead")
    return seconds


def _wait(value: Any) -> float:
    return FOREVER if value == "forever" else read_duration(value)


def _settle(value: Any) -> Settle:
    match value:
        case "auto" | "always" | "off":
            return value  # type: ignore[no-any-return]  # mypy keeps Any through a match of literals
    return read_duration(value)


def parse_signal(value: Any) -> int:
    """Read a signal as kill(1) does: `TERM`, `SIGTERM`, `term` or `15`."""
    text = str(value).upper().removeprefix("SIG")
    if text.isdecimal() and 1 <= int(text) < signal.NSIG:
        return int(text)
    try:
        return signal.Signals[f"SIG{text}"]
    except KeyError:
        raise UsageError(f'"{value}" is not a signal; write a name or number of kill -l') from None


def signal_name(number: int) -> str:
    """Write a signal as kill -l does, without SIG: `TERM`."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return f"signal {number}"


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{value!r} is neither true nor false")
    return value


def _skip_code(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise UsageError(f"{value!r} is not an exit code from 0 to 255")
    return value


def _linger(value: Any) -> Linger:
    try:
        return Linger(value)
    except ValueError:
        raise UsageError(f'"{value}" is none of group, all and none') from None


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{value!r} is not a file name")
    return value


def _log_format(value: Any) -> LogFormat:
    match value:
        case "text" | "json":
            return value  # type: ignore[no-any-return]  # mypy keeps Any through a match of literals
    raise UsageError(f'"{value}" is neither text nor json')


_READERS = {
    "wait": _wait,
    "shared": _flag,
    "skip_code": _skip_code,
    "check_interval": read_positive_duration,
    "check_timeout": read_positive_duration,
    "kill_after": read_duration,
    "ttl": read_positive_duration,
    "settle": _settle,
    "signal": parse_signal,
    "max_runtime": read_positive_duration,
    "min_hold": read_duration,
    "warn_held": read_duration,
    "wait_descendants": _linger,
    "inherit_lock": _flag,
    "connect_timeout": read_positive_duration,
    "connect_retry": read_duration,
    "allow_pooler": _flag,
    "status_file": _path,
    "status_skips": _flag,
    "log_file": _path,
    "log_format": _log_format,
}
SETTING_NAMES = frozenset(_READERS)
DEFAULTS_NAMES = SETTING_NAMES - {"shared"}
"""What `[defaults]` may set: sharing a lock is a property of one key."""

_ONLY_SHORTER = ("check_interval", "check_timeout", "kill_after")


def read_setting(name: str, value: Any) -> Any:
    """Turn one value, from a command line or a config file, into what RunSettings holds.

    Raises:
        UsageError: the value is not of the setting's kind.
    """
    return _READERS[name](value)


def option_of(name: str) -> str:
    """Give the option that sets `name`."""
    return "--" + name.replace("_", "-")


def timing_of_table(table: Mapping[str, Any]) -> Timing:
    """Give the timing that a listed key has on every host, by its table or by default."""
    return Timing(**{setting.name: table[setting.name] for setting in fields(Timing) if setting.name in table})


def build_settings(given: Mapping[str, Any], table: Mapping[str, Any], *, is_listed: bool = False) -> RunSettings:
    """Merge what the command line gave over what the number table says, and check it.

    Args:
        given: values of options that were on the command line, read already.
        table: values of the key's own table over `[defaults]`, read already.
        is_listed: whether the key is in the number table, so that where the table is silent about
            timing, other hosts reckon with the defaults.

    Raises:
        ConfigError: the command line would loosen a timing that the table sets for all hosts.
    """
    others = timing_of_table(table)
    for name in (*_ONLY_SHORTER, "ttl"):
        if name not in given or not (name in table or (is_listed and name in _ONLY_SHORTER)):
            continue
        theirs = getattr(others, name)
        loosens = given[name] < theirs if name == "ttl" else given[name] > theirs
        if loosens:
            may = "only lengthen" if name == "ttl" else "only shorten"
            where = "in the number table" if name in table else "by default"
            raise ConfigError(
                f"{option_of(name)} {given[name]:g} against {theirs:g} {where}: a command line may {may} it, "
                "because other hosts reckon with that. Change the table. Not started, exit 78."
            )
    known = {setting.name for setting in fields(RunSettings)}
    return RunSettings(**{name: value for name, value in {**table, **given}.items() if name in known})


@dataclass(frozen=True)
class RunRequest:
    """One call of `run`, ready to be carried out."""

    settings: RunSettings
    argv: tuple[str, ...]
    keys: tuple[Any, ...] = ()
    key_from_name: str | None = None
    key_text: str = ""
    name: str | None = None
    others_window: float = 0.0
    """The longest that the tree of another host's run may outlive its lock (seconds); 0 when it can only be ours."""
    dsn: str = ""
    verbose: bool = False
