"""The config file: finding the one that counts, reading it, and telling on which line something stands."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from batchguard.core.errors import ConfigError
from batchguard.core.number_table import NumberTable, read_table

SYSTEM_FILE = Path("/etc/batchguard.toml")

_HEADER = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?")
_ASSIGNMENT = re.compile(
    r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*="""
)
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([^\s."']+)""")


def candidate_files(named: str | None, environ: Mapping[str, str]) -> list[Path]:
    """List where a config file is looked for: the named one alone, else the system's, then the user's.

    The current folder is never one of them: under cron it is arbitrary.
    """
    if chosen := named or environ.get("BATCHGUARD_CONFIG"):
        return [Path(chosen)]
    folder = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return [SYSTEM_FILE, Path(folder) / "batchguard.toml"]


def load_table(named: str | None, environ: Mapping[str, str]) -> NumberTable:
    """Read the first config file there is; an empty table where there is none and none was named.

    Raises:
        ConfigError: a named file is missing, or the file cannot be read or is not TOML.
    """
    candidates = candidate_files(named, environ)
    for path in candidates:
        if len(candidates) == 1 or path.exists():
            return read_file(path)
    return NumberTable()


def read_file(path: Path) -> NumberTable:
    """Read one config file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}. Not started, exit 78.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}). Not started, exit 78.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}. Not started, exit 78.") from error
    lines = _Lines(text)
    return read_table(document, str(path), lines.line_of)


class _Lines:
    """Knows on which line each key of a TOML text is written; tomllib does not tell."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, ...], int] = {}
        header: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), 1):
            if found := _HEADER.fullmatch(line):
                header = _parts(found[1])
                self._lines.setdefault(header, number)
            elif found := _ASSIGNMENT.match(line):
                self._lines.setdefault((*header, *_parts(found[1])), number)

    def line_of(self, *path: str) -> int:
        """Give the line of the path, or of the nearest thing around it; 1 for the whole file."""
        for length in range(len(path), 0, -1):
            if line := self._lines.get(path[:length]):
                return line
        return 1


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(next(part for part in found if part) for found in _PART.findall(dotted) if any(found))
