"""`batchguard keys` and `batchguard keys lint`: the number table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from batchguard.cli.options import Config, Dsn, Local, Verbose, choose_dsn, load_config
from batchguard.core.errors import ConfigError
from batchguard.core.exit_codes import ExitCode
from batchguard.core.holder import holder_json
from batchguard.core.keys import KeyRange, keys_of
from batchguard.core.number_table import Finding, NumberTable

app = typer.Typer(
    help="Show the number table, and find its faults.", rich_markup_mode=None, invoke_without_command=True
)


@app.callback()
def keys(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    output_format: Annotated[
        Literal["text", "java"],
        typer.Option("--format", help="java prints an enum, so that the table stays the one list."),
    ] = "text",
    held: Annotated[bool, typer.Option("--held", help="Ask the database who holds each key now.")] = False,
    dsn: Dsn = None,
    config: Config = None,
    local: Local = False,
    verbose: Verbose = False,
) -> int:
    """Show the number table: every name, its key, who uses it for what, and what is set for it."""
    if context.invoked_subcommand is not None:
        context.obj = config  # `keys --config FILE lint` means what `keys lint --config FILE` does
        return 0
    table = load_config(config)
    if table.file is None:
        raise ConfigError("there is no number table: name one with --config, or write /etc/batchguard.toml. Exit 78.")
    if output_format == "java":
        typer.echo(java_enum(table))
        return 0
    holders = _holders(table, choose_dsn(dsn, local, table)) if held else {}
    if as_json:
        for row in rows(table, holders):
            typer.echo(json.dumps(row, ensure_ascii=False))
        return 0
    typer.echo(text_table(table, holders if held else None))
    return 0


@app.command()
def lint(
    context: typer.Context,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="OLD.toml", help="Yesterday's table, or that of another system on the same database."
        ),
    ] = None,
    config: Config = None,
) -> int:
    """List the faults of the number table, a line each; exit 1 when there are any."""
    import os

    from batchguard.adapters.config_file import load_table, read_file
    from batchguard.core.number_table import lint_against, lint_forms

    table = load_table(config or context.obj, os.environ)
    if table.file is None:
        raise ConfigError("there is no number table: name one with --config, or write /etc/batchguard.toml. Exit 78.")
    findings: list[Finding] = [*table.findings, *lint_forms(table)]
    if against is not None:
        findings += lint_against(table, read_file(against))
    for finding in sorted(findings, key=lambda finding: finding.line):
        typer.echo(f"{table.file}:{finding.line}: {finding.message}")
    if findings:
        return ExitCode.FINDINGS
    typer.echo(f"{table.file}: {len(table.entries)} keys, no fault found")
    return ExitCode.OK


def _holders(table: NumberTable, dsn: str) -> dict[str, Mapping[str, Any]]:
    """Ask who holds each name's key now, or the first of its keys that is held; as JSON names it."""
    from batchguard.runtime.inspect import look_once

    locks = {lock for entry in table.entries.values() for key in entry.keys for lock in keys_of(key)}
    seen = look_once(dsn, "keys", sorted(locks, key=str))
    held = [holder for holder in seen.holders if not holder.waits and holder.key is not None]
    return {
        entry.name: holder_json(holder, seen.database, seen.server, entry.name)
        for entry in table.entries.values()
        for holder in reversed(held)
        if any(holder.key in keys_of(key) for key in entry.keys)
    }


def rows(table: NumberTable, holders: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give the table as JSON names it, the retired numbers last."""
    live = [
        {
            "name": entry.name,
            "key": [str(key) for key in entry.keys],
            "kind": entry.keys[0].kind if not isinstance(entry.keys[0], KeyRange) else "pair",
            "category": entry.keys[0].category,
            "description": entry.description,
            "shares": entry.shares,
            "retired": False,
            "settings": {name: _plain(value) for name, value in entry.settings.items()},
            "file": table.file,
            "line": entry.line,
            "holder": holders.get(entry.name),
        }
        for entry in table.entries.values()
    ]
    gone: list[dict[str, Any]] = [
        {
            "name": old.name,
            "key": [str(old.key)],
            "kind": old.key.kind if not isinstance(old.key, KeyRange) else "pair",
            "category": old.key.category,
            "description": None,
            "shares": False,
            "retired": True,
            "settings": {},
            "file": table.file,
            "line": old.line,
            "holder": None,
        }
        for old in table.retired
    ]
    return live + gone


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def text_table(table: NumberTable, holders: Mapping[str, Mapping[str, Any]] | None) -> str:
    """Lay the table out in columns for people."""
    from batchguard.cli.listing import plain

    lines: list[Sequence[str]] = []
    for row in rows(table, holders or {}):
        about = "retired" if row["retired"] else row["description"] or ""
        settings = " ".join(f"{name}={value}" for name, value in row["settings"].items())
        holder = row["holder"]["application"] or f"pid {row['holder']['pid']}" if row["holder"] else "free"
        held = [] if holders is None else ["" if row["retired"] else holder]
        lines.append((row["name"], ",".join(row["key"]), *held, settings, about))
    return plain(str(table.file), lines)


def java_enum(table: NumberTable) -> str:
    """Write the table's names and numbers as a Java enum."""
    constants = []
    for entry in table.entries.values():
        for number, key in enumerate(entry.keys):
            suffix = f"_{number + 1}" if len(entry.keys) > 1 else ""
            numbers: tuple[int, ...]
            if isinstance(key, KeyRange):
                numbers = (key.category, key.first, key.last)
            elif key.kind == "pair":
                numbers = (*key.numbers, key.numbers[1])
            else:
                constants.append(
                    f"    // {entry.name}{suffix} is bigint {key.numbers[0]}: pg_try_advisory_lock(bigint)"
                )
                continue
            constants.append(f"    {entry.name.replace('-', '_').upper()}{suffix}({', '.join(map(str, numbers))}),")
    body = "\n".join(constants)
    return f"""// Generated by: batchguard keys --format java. The number table is the one list; do not edit.
public enum LockKey {{
{body}
    ;

    public final int category;
    public final int id;
    public final int lastId;

    LockKey(int category, int id, int lastId) {{
        this.category = category;
        this.id = id;
        this.lastId = lastId;
    }}
}}"""


def register(top: typer.Typer) -> None:
    """Add the group."""
    top.add_typer(app, name="keys")
