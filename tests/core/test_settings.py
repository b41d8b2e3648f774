"""Settings: what an option or a config file may say."""

import signal
from math import inf
from typing import Any

import pytest

from batchguard.core.errors import ConfigError, UsageError
from batchguard.core.guard import Linger
from batchguard.core.settings import (
    SETTING_NAMES,
    RunSettings,
    build_settings,
    parse_signal,
    read_setting,
    timing_of_table,
)
from batchguard.core.timing import Timing


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("wait", "forever", inf),
        ("wait", 5, 5.0),
        ("ttl", "2m", 120.0),
        ("settle", "always", "always"),
        ("settle", "40s", 40.0),
        ("signal", "SIGINT", signal.SIGINT),
        ("wait_descendants", "all", Linger.ALL),
        ("skip_code", 0, 0),
        ("allow_pooler", True, True),
        ("log_format", "json", "json"),
    ],
)
def test_read(name: str, value: Any, read: Any) -> None:
    """Texts of a command line and values of TOML become what the settings hold."""
    assert read_setting(name, value) == read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait", "soon"),
        ("wait", True),
        ("ttl", 0),
        ("max_runtime", "0"),
        ("min_hold", -1),
        ("settle", "never"),
        ("signal", "NOPE"),
        ("signal", 0),
        ("skip_code", 256),
        ("skip_code", "75"),
        ("skip_code", True),
        ("allow_pooler", "yes"),
        ("wait_descendants", "some"),
        ("log_file", ""),
        ("log_format", "xml"),
    ],
)
def test_refuse(name: str, value: Any) -> None:
    """What is not of the setting's kind is a usage error."""
    with pytest.raises(UsageError):
        read_setting(name, value)


@pytest.mark.parametrize("text", ["TERM", "term", "SIGTERM", "15", 15])
def test_signals(text: Any) -> None:
    """Signals are written as for kill(1)."""
    assert parse_signal(text) == signal.SIGTERM


def test_option_beats_table() -> None:
    """What the command line says goes over what the table says."""
    settings = build_settings({"skip_code": 3}, {"skip_code": 4, "min_hold": 5.0})
    assert (settings.skip_code, settings.min_hold, settings.ttl) == (3, 5.0, 60.0)


@pytest.mark.parametrize(
    ("name", "looser", "tighter"), [("ttl", 50.0, 70.0), ("kill_after", 11.0, 9.0), ("check_timeout", 21.0, 1.0)]
)
def test_table_timing_may_only_be_tightened(name: str, looser: float, tighter: float) -> None:
    """Other hosts reckon with the table's numbers, so a command line may not loosen them."""
    table = {"ttl": 60.0, "kill_after": 10.0, "check_timeout": 20.0}
    assert getattr(build_settings({name: tighter}, table), name) == tighter
    with pytest.raises(ConfigError, match="number table"):
        build_settings({name: looser}, table)
    assert getattr(build_settings({name: looser}, {}), name) == looser


def test_a_command_line_may_not_loosen_the_defaults_of_a_listed_key() -> None:
    """Where the table is silent, other hosts reckon with the defaults; a key that is not listed is free."""
    with pytest.raises(ConfigError, match="--kill-after 300 against 10 by default"):
        build_settings({"kill_after": 300.0, "ttl": 360.0}, {}, is_listed=True)
    assert build_settings({"kill_after": 5.0, "ttl": 50.0}, {}, is_listed=True).kill_after == 5.0
    assert build_settings({"kill_after": 300.0, "ttl": 360.0}, {}).kill_after == 300.0


def test_timing_of_others() -> None:
    """What the table says about timing, and the defaults for the rest."""
    assert timing_of_table({"kill_after": 20.0, "skip_code": 9}) == Timing(kill_after=20.0)


def test_every_setting_has_a_reader() -> None:
    """The settings and their readers are the same list."""
    assert set(RunSettings.__dataclass_fields__) == SETTING_NAMES
