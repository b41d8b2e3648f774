"""The number table: names, numbers, and everything that can be wrong with them."""

import tomllib
from typing import Any

import pytest

from batchguard.core.errors import TableError
from batchguard.core.keys import KeyRange, pair, parse_numbers
from batchguard.core.number_table import (
    NumberTable,
    choose_keys,
    lint_against,
    lint_forms,
    read_table,
    settings_of_others,
    verify_table,
)

GOOD = """
dsn = "service=batch"
[defaults]
skip_code = 7
[categories]
100 = "sales"
[keys]
daily_sales = "100:1"
monthly_close = { key = "100:2", max_runtime = "2h", skip_code = 0, description = "月次締め" }
workers = "100:10..12"
both = { key = ["100:1", "100:2"], shares = true }
[retired]
old_export = "100:9"
"""


def read(text: str) -> NumberTable:
    """Read a table; lines are not looked up here."""
    return read_table(tomllib.loads(text), "/etc/batchguard.toml", lambda *path: 14)


def faults(text: str) -> list[str]:
    """Read a table and give what is wrong with it."""
    return [finding.message for finding in read(text).findings]


def test_names_lead_to_keys_and_settings() -> None:
    """A name gives its key, its settings over the defaults, and the text that messages use."""
    table = read(
        GOOD.replace('daily_sales = "100:1"', 'daily_sales = { key = "100:1", shares = true }').replace(
            'key = "100:2",', 'key = "100:2", shares = true,'
        )
    )
    verify_table(table)
    chosen = choose_keys(table, ["monthly_close"])
    assert chosen.keys == (pair(100, 2),)
    assert chosen.text == "100:2 monthly_close"
    assert chosen.settings == {"skip_code": 0, "max_runtime": 7200.0}
    assert choose_keys(table, ["workers"]).keys == (KeyRange(100, 10, 12),)
    assert choose_keys(table, ["both"]).keys == (pair(100, 1), pair(100, 2))


def test_a_number_brings_its_name_and_settings() -> None:
    """Written as a number, a listed key has the same settings as by its name."""
    table = read('[keys]\njob = { key = "1:2", min_hold = 5 }')
    assert choose_keys(table, ["1:2"]) == choose_keys(table, ["job"])
    assert choose_keys(table, ["1:3"]).text == "1:3"


def test_unknown_name() -> None:
    """A name that is not there: which file, what may be meant, what to do."""
    with pytest.raises(TableError) as caught:
        choose_keys(read('[keys]\ndaily_sales = "100:1"'), ["daily_sale"])
    assert str(caught.value) == (
        '"daily_sale" is not in /etc/batchguard.toml. Did you mean daily_sales? '
        "Otherwise add it under [keys] with a number never used."
    )


def test_name_without_a_table() -> None:
    """A name without any number table says where one was looked for."""
    with pytest.raises(TableError, match=r"no number table \(looked for /etc/batchguard.toml\)"):
        choose_keys(NumberTable(), ["job"], ["/etc/batchguard.toml"])


def test_retired_number() -> None:
    """A retired number is refused, written as a number too, and inside a range."""
    table = read('[retired]\nold_export = "100:9"')
    with pytest.raises(TableError) as caught:
        choose_keys(table, ["100:9"])
    assert str(caught.value) == (
        "100:9 is retired (old_export, /etc/batchguard.toml:14); numbers are never given again. Choose another."
    )
    with pytest.raises(TableError, match="retired"):
        choose_keys(table, ["100:8..10"])


def test_retired_name() -> None:
    """The name of a retired number is said to be retired, not unknown."""
    with pytest.raises(TableError, match="old_export is retired"):
        choose_keys(read('[retired]\nold_export = "100:9"'), ["old_export"])


def test_unlisted_category() -> None:
    """With [categories], another category is refused: that keeps two systems on one database apart."""
    table = read('[categories]\n100 = "sales"')
    choose_keys(table, ["100:1"])
    choose_keys(table, ["bigint:5"])
    with pytest.raises(TableError, match=r"category 200 of 200:1 is not listed .* which has 100 \(sales\)"):
        choose_keys(table, ["200:1"])


def test_two_names_that_disagree() -> None:
    """Two keys whose tables set one thing differently need a decision."""
    table = read('[keys]\na = { key = "1:1", min_hold = 5 }\nb = { key = "1:2", min_hold = 6 }')
    with pytest.raises(TableError, match="a and b set min_hold differently"):
        choose_keys(table, ["a", "b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dns = 'x'", 'unknown setting "dns" at the top; did you mean dsn?'),
        ("[defaults]\nskipcode = 1", 'unknown setting "skipcode" in [defaults]; did you mean skip_code?'),
        ("[defaults]\nshared = true", 'unknown setting "shared" in [defaults]'),
        ("[defaults]\nttl = 'soon'", 'ttl: "soon" is not a duration'),
        ("[jobs]\nleas = '60s'", 'unknown setting "leas" in [jobs]; did you mean lease?'),
        ("[keys]\na = { key = '1:1', minhold = 1 }", 'unknown setting "minhold" in the table of a'),
        ("[keys]\na = '100'", 'key "100" is one number'),
        ("[keys]\na = 'b'", 'a needs a key such as "100:1"'),
        ("[keys]\na = 5", 'a needs a key such as "100:1"'),
        ("[keys]\nA = '1:1'", 'name "A" must be a small letter'),
        ("[keys]\na = '1:1'\nb = '1:1'", "1:1 is given to a (line 14) and to b."),
        ("[keys]\na = '1:1..5'\nb = '1:3'", "1:3 is given to a (line 14) and to b."),
        ("[keys]\na = { key = '1:1', shares = true }\nb = '1:1'", "1:1 is given to a (line 14) and to b."),
        ("[keys]\na = '1:1'\n[retired]\nb = '1:1'", "1:1 is retired (b, "),
        ("[keys]\na = '2:1'\n[categories]\n1 = 'x'", "category 2 of 2:1 is not listed"),
        ("[categories]\nsales = 'x'", 'category "sales" is not a number'),
        ("[keys]\na = { key = '1:1', ttl = '30s' }", "a: unsafe timing: check-timeout 20 (twice)"),
        ("[keys]\na = { key = ['1:1..5', '1:3'] }", "both contain 1:3"),
        ("keys = 5", '"keys" must be a table'),
        ("local = 'yes'", '"local" must be a true or false'),
    ],
)
def test_faults(text: str, message: str) -> None:
    """Each fault of a table is found and said."""
    found = faults(text)
    assert any(message in fault for fault in found), found


def test_shared_numbers_are_allowed_when_both_say_so() -> None:
    """Two names may share a number on purpose; the number alone then stands for neither's settings."""
    table = read("[keys]\na = { key = '1:1', shares = true, min_hold = 5 }\nb = { key = '1:1', shares = true }")
    verify_table(table)
    assert choose_keys(table, ["1:1"]).settings == {}


def test_first_fault_names_file_and_line() -> None:
    """A broken table stops a run with file, line, and how many faults more there are."""
    with pytest.raises(TableError) as caught:
        verify_table(read("dns = 'x'\n[defaults]\nttl = 'soon'"))
    assert str(caught.value).startswith("/etc/batchguard.toml:14: ")
    assert str(caught.value).endswith("(1 more: batchguard keys lint).")


def test_mixed_forms() -> None:
    """Pairs and bigints in one table look alike and never exclude each other."""
    assert lint_forms(read("[keys]\na = '1:1'\nb = 'bigint:1'"))
    assert not lint_forms(read("[keys]\na = '1:1'\nb = '1:2..3'"))


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        ("[keys]\na = '1:2'", "[keys]\na = '1:1'", "a had 1:1 in"),
        ("[keys]\nb = '1:1'", "[keys]\na = '1:1'", "1:1 of b is a's in"),
        ("[keys]\nb = '1:1'", "[retired]\na = '1:1'", "1:1 of b is a (retired)'s in"),
        ("[keys]\nb = '1:1..3'", "[keys]\na = '1:2'", "1:2 of b is a's in"),
    ],
)
def test_against_another_table(new: str, old: str, message: str) -> None:
    """Numbers that changed, were reused, or clash with another system's are found."""
    [finding] = lint_against(read(new), read(old))
    assert message in finding.message
    assert not lint_against(read(old), read(old))


def test_no_surprise_from_odd_documents() -> None:
    """Values of any TOML type lead to a finding, never to an exception."""
    odd: list[Any] = [1, True, 1.5, "x", ["x"], {"x": 1}, {}]
    for name in ("dsn", "local", "defaults", "categories", "keys", "retired", "jobs"):
        for value in odd:
            read_table({name: value}, "f", lambda *path: 1)
            read_table({name: {"a": value}}, "f", lambda *path: 1)


def test_settings_of_others_are_those_of_every_name_that_shares_a_number() -> None:
    """By name, by number, by one slot of a range, and beside a name that shares it: all of them count."""
    document = {
        "defaults": {"check_timeout": "30s", "ttl": "2m"},
        "keys": {
            "quick": {"key": "1:1", "kill_after": "2s", "shares": True},
            "slow": {"key": "1:1", "kill_after": "20s", "shares": True},
            "slots": {"key": "1:10..12", "kill_after": "3s"},
        },
    }
    table = read_table(document, "t.toml", lambda *_: 1)

    def graces(*keys: str) -> list[float]:
        wanted = [key for text in keys if (key := parse_numbers(text))]
        return sorted(settings["kill_after"] for settings in settings_of_others(table, wanted))

    assert graces("1:1") == [2.0, 20.0]
    assert graces("1:11") == [3.0]
    assert graces("1:1", "1:10..12") == [2.0, 3.0, 20.0]
    assert graces("9:9") == []
    assert all(settings["check_timeout"] == 30.0 for settings in settings_of_others(table, [pair(1, 1)]))
