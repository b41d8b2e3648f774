"""The number table: which name has which key, what is set for it, and what is wrong with the table."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from batchguard.core.errors import BatchguardError, TableError, UsageError
from batchguard.core.job_settings import JOBS_NAMES, read_job_setting
from batchguard.core.keys import NAME_PATTERN, Key, KeyRange, LockKey, keys_of, order_keys, parse_numbers
from batchguard.core.settings import DEFAULTS_NAMES, SETTING_NAMES, RunSettings, option_of, read_setting
from batchguard.core.timing import verify_timing

TOP_NAMES = frozenset({"dsn", "local", "defaults", "categories", "keys", "retired", "jobs"})
ENTRY_NAMES = SETTING_NAMES | {"key", "shares", "description"}

LineOf = Callable[..., int]
"""Gives the line on which a path of TOML keys stands, as in `line_of("keys", "daily_sales", "ttl")`."""


@dataclass(frozen=True)
class Finding:
    """One fault of a table and the line it is on."""

    line: int
    message: str


@dataclass(frozen=True)
class Entry:
    """One name of the table; `settings` are those of its own table, read."""

    name: str
    keys: tuple[Key, ...]
    line: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    shares: bool = False
    description: str | None = None


@dataclass(frozen=True)
class Retired:
    """A number once given, which is never given again."""

    name: str
    key: Key
    line: int


@dataclass(frozen=True)
class NumberTable:
    """One config file, read; without a file, an empty table with `file` None."""

    file: str | None = None
    dsn: str | None = None
    local: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    jobs: Mapping[str, Any] = field(default_factory=dict)
    categories: Mapping[int, str] = field(default_factory=dict)
    entries: Mapping[str, Entry] = field(default_factory=dict)
    retired: tuple[Retired, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Chosen:
    """What `--key` led to: the keys in their order, the text that messages use, and the table's settings."""

    keys: tuple[Key, ...]
    text: str
    name: str | None
    settings: Mapping[str, Any]


class _Reader:
    """Reads one document, and goes on after a fault so that `keys lint` can list them all."""

    def __init__(self, document: Mapping[str, Any], file: str, line_of: LineOf) -> None:
        self.document = document
        self.file = file
        self.line_of = line_of
        self.findings: list[Finding] = []

    def fault(self, message: str, *path: str) -> None:
        self.findings.append(Finding(self.line_of(*path), message))

    def table(self, name: str) -> Mapping[str, Any]:
        value = self.document.get(name, {})
        if isinstance(value, Mapping):
            return value
        self.fault(f'"{name}" must be a table: [{name}]', name)
        return {}

    def read(self) -> NumberTable:
        for name in self.document.keys() - TOP_NAMES:
            self.fault(_unknown(name, TOP_NAMES, "at the top"), name)
        jobs = self.settings(
            self.table("jobs"), JOBS_NAMES, "in [jobs]", "jobs", known=JOBS_NAMES, read=read_job_setting
        )
        defaults = self.settings(self.table("defaults"), DEFAULTS_NAMES, "in [defaults]", "defaults")
        categories = dict(self.categories())
        entries = {name: entry for name, value in self.table("keys").items() if (entry := self.entry(name, value))}
        retired = tuple(self.retired())
        self.check_numbers(entries, retired, categories)
        self.check_timing(entries, defaults)
        return NumberTable(
            file=self.file,
            dsn=self.typed("dsn", str),
            local=bool(self.typed("local", bool)),
            defaults=defaults,
            jobs=jobs,
            categories=categories,
            entries=entries,
            retired=retired,
            findings=tuple(sorted(self.findings, key=lambda finding: finding.line)),
        )

    def typed(self, name: str, kind: type) -> Any:
        value = self.document.get(name)
        if value is not None and not isinstance(value, kind):
            self.fault(f'"{name}" must be a {"text" if kind is str else "true or false"}', name)
            return None
        return value

    def settings(
        self,
        table: Mapping[str, Any],
        allowed: frozenset[str],
        where: str,
        *path: str,
        known: frozenset[str] = SETTING_NAMES,
        read: Callable[[str, Any], Any] = read_setting,
    ) -> dict[str, Any]:
        settings = {}
        for name, value in table.items():
            if name not in allowed:
                self.fault(_unknown(name, allowed, where), *path, name)
            elif name in known:
                try:
                    settings[name] = read(name, value)
                except UsageError as error:
                    self.fault(f"{name}: {error}", *path, name)
        return settings

    def categories(self) -> Iterator[tuple[int, str]]:
        for text, title in self.table("categories").items():
            try:
                yield int(text), str(title)
            except ValueError:
                self.fault(f'category "{text}" is not a number', "categories", text)

    def entry(self, name: str, value: Any) -> Entry | None:
        path = ("keys", name)
        if not NAME_PATTERN.fullmatch(name):
            self.fault(f'name "{name}" must be a small letter and up to 31 of a-z, 0-9, _ and -', *path)
        own = value if isinstance(value, Mapping) else {"key": value}
        written = own.get("key")
        texts = written if isinstance(written, list) else [written]
        keys = [key for text in texts if (key := self.key(text, *path))]
        if not keys:
            return None
        try:
            ordered = order_keys(keys)
        except TableError as error:
            self.fault(str(error), *path)
            return None
        return Entry(
            name=name,
            keys=ordered,
            line=self.line_of(*path),
            settings=self.settings(own, ENTRY_NAMES, f"in the table of {name}", *path),
            shares=own.get("shares") is True,
            description=str(own["description"]) if "description" in own else None,
        )

    def key(self, text: Any, *path: str) -> Key | None:
        try:
            key = parse_numbers(text) if isinstance(text, str) else None
        except TableError as error:
            self.fault(str(error), *path)
            return None
        if key is None:
            self.fault(f'{path[-1]} needs a key such as "100:1", "100:10..12" or "bigint:4711"', *path)
        return key

    def retired(self) -> Iterator[Retired]:
        for name, text in self.table("retired").items():
            if key := self.key(text, "retired", name):
                yield Retired(name, key, self.line_of("retired", name))

    def check_numbers(
        self, entries: Mapping[str, Entry], retired: Sequence[Retired], categories: Mapping[int, str]
    ) -> None:
        seen: dict[LockKey, Entry] = {}
        for entry in entries.values():
            path = ("keys", entry.name)
            for key in entry.keys:
                if message := _refusal(key, categories, retired, self.file):
                    self.fault(message, *path)
                for lock in keys_of(key):
                    other = seen.setdefault(lock, entry)
                    if other is not entry and not (other.shares and entry.shares):
                        self.fault(
                            f"{lock} is given to {other.name} (line {other.line}) and to {entry.name}. Choose another "
                            "number, or say shares = true in both if they must exclude each other",
                            *path,
                        )
                        break

    def check_timing(self, entries: Mapping[str, Entry], defaults: Mapping[str, Any]) -> None:
        tables = [
            (("defaults",), defaults),
            *((("keys", e.name), {**defaults, **e.settings}) for e in entries.values()),
        ]
        for path, settings in tables:
            try:
                verify_timing(RunSettings(**settings).timing)
            except BatchguardError as error:
                self.fault(f"{path[-1]}: {str(error).removesuffix(' Not started, exit 78.')}", *path)
                if path == ("defaults",):
                    return  # all that say nothing else have the same fault


def _unknown(name: str, known: frozenset[str], where: str) -> str:
    near = get_close_matches(name, known, 1)
    return f'unknown setting "{name}" {where}' + (f"; did you mean {near[0]}?" if near else "")


def _refusal(key: Key, categories: Mapping[int, str], retired: Sequence[Retired], file: str) -> str | None:
    """Say why a table forbids a key, whether the table or a command line names it."""
    locks = set(keys_of(key))
    for gone in retired:
        if locks & set(keys_of(gone.key)):
            return f"{key} is retired ({gone.name}, {file}:{gone.line}); numbers are never given again. Choose another."
    category = key.category
    if categories and category is not None and category not in categories:
        listed = ", ".join(f"{number} ({title})" for number, title in categories.items())
        return f"category {category} of {key} is not listed in [categories] of {file}, which has {listed}."
    return None


def read_table(document: Mapping[str, Any], file: str, line_of: LineOf) -> NumberTable:
    """Read a config file's TOML document; every fault is in `findings`, none is raised."""
    return _Reader(document, file, line_of).read()


def verify_table(table: NumberTable) -> None:
    """Refuse a table with a fault.

    Raises:
        TableError: names file, line and the first fault.
    """
    if table.findings:
        first, *more = table.findings
        others = f" ({len(more)} more: batchguard keys lint)" if more else ""
        text = first.message.removesuffix(".") + others
        stop = "" if text.endswith("?") else "."
        raise TableError(f"{table.file}:{first.line}: {text}{stop}")


def choose_keys(
    table: NumberTable, requested: Sequence[str], searched: Sequence[str] = (), *, must_agree: bool = True
) -> Chosen:
    """Turn the texts of `--key` into keys, by the table's names where they are no numbers.

    Args:
        table: the config file, or an empty table.
        requested: what was written after `--key`.
        searched: where a config file was looked for; named when a name was given and no file found.
        must_agree: whether names that set one thing differently are refused; else the first name's settings count.

    Raises:
        TableError: no such key or name, a retired number, an unlisted category, or two names
            that set one thing differently.
    """
    keys: list[Key] = []
    entries: list[Entry] = []
    for text in requested:
        number = parse_numbers(text)
        if number is None:
            entry = _named(table, text, searched)
            entries.append(entry)
            keys.extend(entry.keys)
            continue
        if message := _refusal(number, table.categories, table.retired, table.file or ""):
            raise TableError(message)
        keys.append(number)
        entries.extend(_entries_of(table, number))
    ordered = order_keys(keys)
    names = list(dict.fromkeys(entry.name for entry in entries))
    return Chosen(
        keys=ordered,
        text=" ".join([",".join(str(key) for key in ordered), *names]),
        name=",".join(names) or None,
        settings={**table.defaults, **(_merge(entries) if must_agree else _merge(entries[:1]))},
    )


def find_keys(table: NumberTable, requested: Sequence[str], searched: Sequence[str] = ()) -> tuple[Key, ...]:
    """Turn the texts of `--key` into keys for looking, which also a retired number or an unlisted category may be.

    Raises:
        TableError: no such key or name.
    """
    keys: list[Key] = []
    for text in requested:
        number = parse_numbers(text)
        gone = [old.key for old in table.retired if old.name == text]
        keys += [number] if number else gone or _named(table, text, searched).keys
    return tuple(dict.fromkeys(keys))


def category_keys(table: NumberTable, text: str) -> list[str]:
    """Give the names of every key of a category, which is written as its number or its title.

    Raises:
        TableError: no key is listed there; only what the table lists can be found.
    """
    wanted = [number for number, title in table.categories.items() if title == text]
    if not wanted and re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        wanted = [int(text)]
    names = [entry.name for entry in table.entries.values() if any(key.category in wanted for key in entry.keys)]
    if not names:
        where = table.file or "the number table, since there is none (name one with --config)"
        raise TableError(f'no key of category "{text}" is listed in {where}.')
    return names


def names_by_lock(table: NumberTable) -> dict[LockKey, str]:
    """Give every number's name, or names where it is shared; of a retired number it is said that it is."""
    names: dict[LockKey, list[str]] = {}
    for entry in table.entries.values():
        for key in entry.keys:
            for lock in keys_of(key):
                names.setdefault(lock, []).append(entry.name)
    for gone in table.retired:
        for lock in keys_of(gone.key):
            names.setdefault(lock, []).append(f"{gone.name} (retired)")
    return {lock: ",".join(found) for lock, found in names.items()}


def settings_of_others(table: NumberTable, keys: Sequence[Key]) -> list[Mapping[str, Any]]:
    """List the settings of all names that share a number with these keys: runs on other hosts may have any of them."""
    wanted = {lock for key in keys for lock in keys_of(key)}
    return [
        {**table.defaults, **entry.settings}
        for entry in table.entries.values()
        if any(lock in wanted for key in entry.keys for lock in keys_of(key))
    ]


def _entries_of(table: NumberTable, key: Key) -> list[Entry]:
    """Find the one name that a number has in the table; a shared number stands for none of its names."""
    found = [entry for entry in table.entries.values() if key in entry.keys]
    return found if len(found) == 1 else []


def _named(table: NumberTable, name: str, searched: Sequence[str]) -> Entry:
    if not NAME_PATTERN.fullmatch(name):
        raise TableError(
            f'"{name}" is not a key: write CATEGORY:ID in whole numbers (100:1), FIRST..LAST for a range (100:10..12), '
            "bigint:NUMBER, or a name from the number table."
        )
    if name in table.entries:
        return table.entries[name]
    if table.file is None:
        looked = f" (looked for {', '.join(searched)})" if searched else ""
        raise TableError(
            f'"{name}" is neither a key such as 100:1 nor a known name: there is no number table{looked}. '
            "Name one with --config, or write numbers."
        )
    for gone in table.retired:
        if gone.name == name:
            raise TableError(f"{name} is retired ({gone.key}, {table.file}:{gone.line}). Choose another.")
    near = get_close_matches(name, table.entries, 1)
    meant = f"Did you mean {near[0]}? Otherwise add" if near else "Add"
    raise TableError(f'"{name}" is not in {table.file}. {meant} it under [keys] with a number never used.')


def _merge(entries: Sequence[Entry]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    by: dict[str, str] = {}
    for entry in entries:
        for name, value in entry.settings.items():
            if name in merged and merged[name] != value:
                raise TableError(
                    f"{by[name]} and {entry.name} set {name} differently; for a run with both give {option_of(name)}."
                )
            merged[name] = value
            by[name] = entry.name
    return merged


def lint_forms(table: NumberTable) -> list[Finding]:
    """Find what is allowed and still a trap: names that look alike, and pairs beside bigints, which never exclude."""
    return _look_alikes(table) + _mixed_kinds(table)


def _look_alikes(table: NumberTable) -> list[Finding]:
    """Find names that differ in - and _ alone: people, and the Java enum, take them for one."""
    seen: dict[str, Entry] = {}
    findings = []
    for entry in table.entries.values():
        other = seen.setdefault(entry.name.replace("-", "_"), entry)
        if other is not entry:
            findings.append(Finding(entry.line, f"{entry.name} and {other.name} (line {other.line}) look alike"))
    return findings


def _mixed_kinds(table: NumberTable) -> list[Finding]:
    kinds = {
        "pair" if isinstance(key, KeyRange) else key.kind: entry
        for entry in table.entries.values()
        for key in entry.keys
    }
    if len(kinds) < 2:
        return []
    return [
        Finding(
            kinds["bigint"].line,
            f"{kinds['bigint'].name} is a bigint and {kinds['pair'].name} a pair: two number spaces that never exclude "
            "each other. Use one form in a table",
        )
    ]


def lint_against(table: NumberTable, other: NumberTable) -> list[Finding]:
    """Compare with yesterday's table, or another system's on the same database: changed, reused, clashing numbers."""
    findings = []
    for entry in table.entries.values():
        before = other.entries.get(entry.name)
        if before is not None and before.keys != entry.keys:
            was = ",".join(str(key) for key in before.keys)
            findings.append(
                Finding(entry.line, f"{entry.name} had {was} in {other.file}:{before.line}; a number never changes")
            )
        locks = {lock for key in entry.keys for lock in keys_of(key)}
        for name, line, keys in _numbers_of(other):
            common = locks & {lock for key in keys for lock in keys_of(key)}
            if common and name != entry.name:
                first = min(common, key=lambda lock: lock.in_pg_locks)
                findings.append(
                    Finding(entry.line, f"{first} of {entry.name} is {name}'s in {other.file}:{line}; choose another")
                )
    return findings


def _numbers_of(table: NumberTable) -> list[tuple[str, int, tuple[Key, ...]]]:
    used = [(entry.name, entry.line, entry.keys) for entry in table.entries.values()]
    return used + [(f"{gone.name} (retired)", gone.line, (gone.key,)) for gone in table.retired]
