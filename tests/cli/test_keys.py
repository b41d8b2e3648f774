"""`batchguard keys` and `keys lint`."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.fixtures.guard import StartRun
from tests.fixtures.server import Server

TABLE = """[categories]
100 = "sales"

[keys]
daily_sales = { key = "100:1", ttl = "2m", description = "日次売上" }
workers = "100:10..12"

[retired]
old_export = "100:9"
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a number table."""
    file = tmp_path / "batchguard.toml"
    file.write_text(TABLE, encoding="utf-8")
    return file


def test_keys_lists_the_table(start: StartRun, table: Path) -> None:
    """People see names, keys, settings, descriptions and what is retired."""
    shown = start("keys", "--config", str(table))
    assert shown.code() == 0
    lines = shown.out.splitlines()
    assert lines[0] == f"# {table}"
    assert lines[1].split() == ["daily_sales", "100:1", "ttl=120.0", "日次売上"]
    assert lines[3].split() == ["old_export", "100:9", "retired"]


def test_keys_json(start: StartRun, table: Path) -> None:
    """Machines get an object a line, every key present."""
    shown = start("keys", "--config", str(table), "--json")
    assert shown.code() == 0
    rows = [json.loads(line) for line in shown.out.splitlines()]
    keys = {"name", "key", "kind", "category", "description", "shares", "retired", "settings", "file", "line", "holder"}
    assert all(row.keys() == keys for row in rows)
    assert [(row["name"], row["key"], row["line"]) for row in rows] == [
        ("daily_sales", ["100:1"], 5),
        ("workers", ["100:10..12"], 6),
        ("old_export", ["100:9"], 9),
    ]


def test_keys_held(start: StartRun, table: Path, server: Server) -> None:
    """--held asks the database who holds what."""
    with server.connect(application_name="psql") as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1)")
        shown = start("keys", "--config", str(table), "--held")
        assert shown.code() == 0
    lines = shown.out.splitlines()
    assert lines[1].split()[:3] == ["daily_sales", "100:1", "psql"]
    assert lines[2].split()[:3] == ["workers", "100:10..12", "free"]


def test_keys_java(start: StartRun, table: Path, tmp_path: Path) -> None:
    """--format java prints an enum that javac accepts."""
    shown = start("keys", "--config", str(table), "--format", "java")
    assert shown.code() == 0
    source = tmp_path / "LockKey.java"
    source.write_text(shown.out, encoding="utf-8")
    assert "DAILY_SALES(100, 1, 1)," in shown.out
    assert "WORKERS(100, 10, 12)," in shown.out
    try:
        subprocess.run(["javac", "-encoding", "UTF-8", "-d", str(tmp_path), str(source)], check=True)
    except FileNotFoundError:
        pytest.skip("no javac")


def test_lint(start: StartRun, table: Path) -> None:
    """A sound table: exit 0."""
    sound = start("keys", "lint", "--config", str(table))
    assert sound.code() == 0
    assert sound.out == f"{table}: 2 keys, no fault found\n"


def test_lint_lists_every_fault(start: StartRun, table: Path) -> None:
    """Faults: a line each with file and line number, exit 1."""
    table.write_text(TABLE.replace('"100:10..12"', '"200:1"').replace("ttl", "tll"), encoding="utf-8")
    broken = start("keys", "lint", "--config", str(table))
    assert broken.code() == 1
    first, second = broken.out.splitlines()
    assert first == f'{table}:5: unknown setting "tll" in the table of daily_sales; did you mean ttl?'
    assert second.startswith(f"{table}:6: category 200 of 200:1 is not listed")


def test_lint_takes_the_groups_config(start: StartRun, table: Path) -> None:
    """`keys --config FILE lint` is `keys lint --config FILE`; names that look alike are found."""
    table.write_text('[keys]\na-b = "1:1"\na_b = "1:2"\n')
    found = start("keys", "--config", str(table), "lint")
    assert found.code() == 1
    assert found.out == f"{table}:3: a_b and a-b (line 2) look alike\n"


def test_lint_against(start: StartRun, table: Path, tmp_path: Path) -> None:
    """--against finds a number that changed since yesterday."""
    old = tmp_path / "old.toml"
    old.write_text('[keys]\ndaily_sales = "100:7"\n')
    changed = start("keys", "lint", "--config", str(table), "--against", str(old))
    assert changed.code() == 1
    assert changed.out == f"{table}:5: daily_sales had 100:7 in {old}:2; a number never changes\n"


def test_no_table(start: StartRun) -> None:
    """Without a table: 78, and how to have one."""
    shown = start("keys")
    assert shown.code() == 78
    assert "there is no number table" in shown.err


def test_config_file_from_the_environment_and_from_xdg(start: StartRun, table: Path, tmp_path: Path) -> None:
    """BATCHGUARD_CONFIG names the file; else the XDG folder's is found; never the current folder's."""
    assert start("keys", env={"BATCHGUARD_CONFIG": str(table)}).code() == 0
    assert start("keys", cwd=str(tmp_path)).code() == 78
    (tmp_path / "xdg").mkdir()
    table.rename(tmp_path / "xdg" / "batchguard.toml")
    assert start("keys").code() == 0


def test_number_table_settings_apply(start: StartRun, server: Server, tmp_path: Path) -> None:
    """A run by name has its own table's settings over the defaults; an option beats both."""
    file = tmp_path / "t.toml"
    file.write_text('[defaults]\nskip_code = 4\n[keys]\na = "100:1"\nb = { key = "100:2", skip_code = 5 }\n')
    with server.connect() as psql:
        psql.execute("SELECT pg_advisory_lock(100, 1), pg_advisory_lock(100, 2)")
        config = ("--config", str(file))
        codes = [
            start("run", *config, "--key", "a", "--", "true").code(),
            start("run", *config, "--key", "b", "--", "true").code(),
            start("run", *config, "--key", "b", "-E", "6", "--", "true").code(),
        ]
    assert codes == [4, 5, 6]
