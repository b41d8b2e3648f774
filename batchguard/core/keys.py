"""Lock keys: what a user writes, what PostgreSQL is asked for, and what `pg_locks` shows.

PostgreSQL has two number spaces of advisory locks that do not touch: one bigint, or a pair of int4.
`pg_locks` shows both as unsigned 32 bit numbers: classid and objid, with objsubid 1 for the bigint
space and 2 for the pair space (PostgreSQL manual, "pg_locks").
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batchguard.core.errors import TableError

INT4 = range(-(2**31), 2**31)
INT8 = range(-(2**63), 2**63)
MAX_SLOTS = 1000
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_-]{0,31}", re.ASCII)

_PAIR = re.compile(r"([+-]?\d+):([+-]?\d+)(?:\.\.([+-]?\d+))?", re.ASCII)
_BIGINT = re.compile(r"bigint:([+-]?\d+)", re.ASCII)

Kind = Literal["pair", "bigint"]


@dataclass(frozen=True)
class LockKey:
    """One advisory lock of one database."""

    kind: Kind
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        """Write the key as `--key` reads it."""
        return f"bigint:{self.numbers[0]}" if self.kind == "bigint" else f"{self.numbers[0]}:{self.numbers[1]}"

    @property
    def category(self) -> int | None:
        """The first number of a pair; a bigint has no category."""
        return self.numbers[0] if self.kind == "pair" else None

    @property
    def in_pg_locks(self) -> tuple[int, int, int]:
        """The columns classid, objid and objsubid under which `pg_locks` shows this lock."""
        if self.kind == "pair":
            return self.numbers[0] & 0xFFFFFFFF, self.numbers[1] & 0xFFFFFFFF, 2
        return self.numbers[0] >> 32 & 0xFFFFFFFF, self.numbers[0] & 0xFFFFFFFF, 1


@dataclass(frozen=True)
class KeyRange:
    """The pairs `category:first` to `category:last`; a run takes the first that is free, its slot."""

    category: int
    first: int
    last: int

    def __str__(self) -> str:
        """Write the range as `--key` reads it."""
        return f"{self.category}:{self.first}..{self.last}"

    @property
    def slots(self) -> tuple[LockKey, ...]:
        """Every key of the range, in the order in which they are tried."""
        return tuple(pair(self.category, number) for number in range(self.first, self.last + 1))


Key = LockKey | KeyRange


def pair(category: int, number: int) -> LockKey:
    """Make the key that `pg_try_advisory_lock(category, number)` takes."""
    return LockKey("pair", (category, number))


def bigint(number: int) -> LockKey:
    """Make the key that `pg_try_advisory_lock(number)` takes."""
    return LockKey("bigint", (number,))


def key_in_pg_locks(classid: int, objid: int, objsubid: int) -> LockKey:
    """Give the key that `pg_locks` shows under these columns."""
    if objsubid == 2:
        return pair(_signed(classid, INT4), _signed(objid, INT4))
    return bigint(_signed(classid << 32 | objid, INT8))


def _signed(number: int, limits: range) -> int:
    return number if number in limits else number - (limits.stop - limits.start)


def parse_numbers(text: str) -> Key | None:
    """Read a key written in numbers; None when the text is none, so that it may be a name.

    Raises:
        TableError: numbers, but not a key: out of range, or one bare number.
    """
    if re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        raise TableError(f'key "{text}" is one number; write {text}:ID, or bigint:{text} for the other number space.')
    if found := _BIGINT.fullmatch(text):
        return bigint(_bounded(int(found[1]), INT8, text, "int8"))
    if not (found := _PAIR.fullmatch(text)):
        return None
    category, first = (_bounded(int(number), INT4, text, "int4") for number in found.groups()[:2])
    if found[3] is None:
        return pair(category, first)
    last = _bounded(int(found[3]), INT4, text, "int4")
    if not 0 <= last - first < MAX_SLOTS:
        raise TableError(f'key "{text}" must count upwards, over at most {MAX_SLOTS} slots.')
    return KeyRange(category, first, last)


def _bounded(number: int, limits: range, text: str, size: str) -> int:
    if number not in limits:
        raise TableError(
            f'key "{text}": {number} does not fit {size} ({limits.start} to {limits.stop - 1}). Choose another.'
        )
    return number


def keys_of(key: Key) -> tuple[LockKey, ...]:
    """Give the locks a key may lead to: itself, or every slot of a range."""
    return key.slots if isinstance(key, KeyRange) else (key,)


def order_keys(keys: Sequence[Key]) -> tuple[Key, ...]:
    """Put keys into the one order in which every run takes them, each once.

    The same order everywhere keeps two runs with several keys from holding one each and both
    giving up; the same lock taken twice in a session would have to be released twice.

    Raises:
        TableError: a range contains another of the keys, so that one lock would be asked for twice.
    """
    unique = sorted(dict.fromkeys(keys), key=lambda key: keys_of(key)[0].in_pg_locks[::-1])
    seen: dict[LockKey, Key] = {}
    for key in unique:
        for lock in keys_of(key):
            if lock in seen:
                raise TableError(f"{key} and {seen[lock]} both contain {lock}. Give only one of them.")
            seen[lock] = key
    return tuple(unique)
