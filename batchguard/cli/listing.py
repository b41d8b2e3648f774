"""Tables for people: aligned lines in a pipe, a table that fits its width on a terminal."""

import contextlib
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MOST_ROWS = 500
"""A terminal shows no more rows than this; a pipe gets all."""

STYLES = {"held": "bold red", "waiting": "yellow", "free": "green", "warning": "bold yellow", "error": "bold red"}
"""Colours for the words that stand in a column of their own."""

Rows = Sequence[Sequence[str]]


def print_listing(title: str, header: Sequence[str], rows: Rows, empty: str) -> None:
    """Print a title and rows to stdout; `empty` stands where there is none."""
    if is_terminal():
        _console().print(render(title, header, rows, empty))
    else:
        typer.echo(plain(title, rows, empty))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines of JSON: UTF-8, whatever the terminal's encoding is, since that is what JSON is.

    Raises:
        OSError: they cannot be written.
    """
    from batchguard.adapters import report

    if not lines:
        return
    data = "\n".join([*lines, ""]).encode("utf-8", "backslashreplace")
    sys.stdout.flush()
    report.write_all(sys.stdout.fileno(), data)


def plain(title: str, rows: Rows, empty: str = "") -> str:
    """Lay rows out one a line, with columns aligned; the title is a comment."""
    widths = [max(map(_cells, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell + " " * (width - _cells(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([f"# {title}", *(lines or ([empty] if empty else []))])


def _cells(text: str) -> int:
    """Count the columns a text takes: a letter of East Asia is two wide, a combining sign none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text
    )


def render(title: str, header: Sequence[str], rows: Rows, empty: str) -> "RenderableType":
    """Make what rich shows: a table whose last column takes the rest of the width."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return Group(Text(title, style="bold"), Text(empty))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows[:MOST_ROWS]:
        # Text, never markup: what sessions say of themselves must not be taken for instructions.
        table.add_row(*(Text(cell, style=STYLES.get(cell.partition(",")[0], "")) for cell in row))
    more = len(rows) - MOST_ROWS
    tail = [Text(f"… and {more} more: --key shows one, a pipe all", style="bold")] if more > 0 else []
    return Group(Text(title, style="bold"), table, *tail)


def _console() -> "Console":
    """Give what writes to the terminal; with NO_COLOR not even bold letters."""
    from rich.console import Console

    return Console(highlight=False, color_system=None if os.environ.get("NO_COLOR") else "auto")


@contextlib.contextmanager
def screen(*, wanted: bool) -> Iterator[Callable[[str, Sequence[str], Rows, str], None] | None]:
    """Give a function that replaces what the terminal shows; None where there is no terminal to do so."""
    if not wanted:
        yield None
        return
    from rich.live import Live

    with Live(console=_console(), screen=True, auto_refresh=False) as live:
        yield lambda *listing: live.update(render(*listing), refresh=True)


def is_terminal() -> bool:
    """Tell whether a person reads stdout."""
    return os.isatty(1)
