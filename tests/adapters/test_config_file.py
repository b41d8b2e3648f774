"""The config file."""

from pathlib import Path

import pytest

from batchguard.adapters.config_file import candidate_files, load_table, read_file
from batchguard.core.errors import ConfigError


def test_candidates() -> None:
    """A named file is the only one; else the system's, then the user's; never the current folder's."""
    assert candidate_files("a.toml", {"BATCHGUARD_CONFIG": "b.toml"}) == [Path("a.toml")]
    assert candidate_files(None, {"BATCHGUARD_CONFIG": "b.toml"}) == [Path("b.toml")]
    assert candidate_files(None, {"XDG_CONFIG_HOME": "/x"}) == [
        Path("/etc/batchguard.toml"),
        Path("/x/batchguard.toml"),
    ]


def test_lines(tmp_path: Path) -> None:
    """Findings name the line, in tables of every notation."""
    file = tmp_path / "t.toml"
    file.write_text(
        "dsn = 5\n"  # 1
        "[ keys ]  # a comment\n"  # 2
        'a = "100"\n'  # 3
        '"B" = "1:1"\n'  # 4
        "[keys.c]\n"  # 5
        'key = "1:2"\n'  # 6
        'ttl = "soon"\n'  # 7
        "[defaults]\n"  # 8
        "nosuch = 1\n"  # 9
    )
    assert [finding.line for finding in read_file(file).findings] == [1, 3, 4, 7, 9]


def test_one_file_is_used_never_merged(tmp_path: Path) -> None:
    """What is not in the file that counts is not looked for in another."""
    (tmp_path / "batchguard.toml").write_text('[keys]\na = "1:1"\n')
    other = tmp_path / "other.toml"
    other.write_text('[keys]\nb = "1:2"\n')
    assert set(load_table(None, {"XDG_CONFIG_HOME": str(tmp_path)}).entries) == {"a"}
    assert set(load_table(str(other), {"XDG_CONFIG_HOME": str(tmp_path)}).entries) == {"b"}


@pytest.mark.parametrize(("content", "message"), [(b"\xff", "not UTF-8"), (b"[", "not valid TOML")])
def test_unreadable(tmp_path: Path, content: bytes, message: str) -> None:
    """A file that is no TOML is an error, not an empty table."""
    file = tmp_path / "t.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_file(file)
