"""Payloads: JSON that PostgreSQL can keep and give back, checked before anything is sent."""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from batchguard.core.errors import UsageError

DEEPEST = 500
"""Arrays and objects within one another; the server's own limit depends on its max_stack_depth."""

LONGEST_NUMBER = 1000
"""Digits: jsonb keeps numbers as numeric, and prints 1e131071 with all its digits."""

QUOTES = 2
"""Bytes that a payload may be over `max_payload`: the quotes of a string are not counted."""

_FAST_SHARE = 50
"""How much a payload can grow when the server prints it, where no exponent has three digits: 1e99 is four bytes, and
100 digits with the rest of what is printed around it."""

_SUSPECT = re.compile(
    r"\\u(?:0000|[dD][89a-fA-F])"  # a NUL; half a pair
    r"|(?:^|[\[:,\s])-?\d[\d.]*[eE][+-]?\d{3}"  # a long number in few letters
    r"|\d{500}"  # or in many
)
_NUMBER = re.compile(r"-?(\d+)(?:\.(\d+))?(?:[eE](\+|-|)0*(\d*))?")


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


def refuse_constant(name: str) -> NoReturn:
    """Refuse what Python's reader would let pass.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"{name} is not JSON: there is no number for it")


def read_whole(digits: str) -> int | str:
    """Read an integer of a field; int() would refuse one of over 4300 digits, which a payload may have."""
    return int(digits) if len(digits) < 20 else digits


# What numbers are read as does not matter at first: len is quick, and takes any number of digits.
_QUICK = json.JSONDecoder(parse_constant=refuse_constant, parse_int=len, parse_float=len)
_EXACT = json.JSONDecoder(parse_constant=refuse_constant, parse_int=_Number, parse_float=_Number)


def decode_utf8(data: bytes) -> str:
    """Turn bytes into text.

    Raises:
        UsageError: they are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"byte {error.start + 1} is not UTF-8 (0x{data[error.start]:02x})") from None


def verify_payload(text: str, max_payload: int, *, is_parsed: bool = False) -> None:
    """Refuse what PostgreSQL would not take, or could not give back.

    Args:
        text: one JSON value.
        max_payload: how many bytes it may have when the server prints it.
        is_parsed: whether it is known to be JSON.

    Raises:
        UsageError: what is wrong with it.
    """
    is_harmless = (
        len(text) * _FAST_SHARE <= max_payload
        and text.count("[") + text.count("{") <= DEEPEST
        and not _SUSPECT.search(text)
    )
    if is_harmless:
        if not is_parsed:
            _parse(_QUICK, text)
        return
    size = sum(_sizes(_parse(_EXACT, text)))
    if size > max_payload + QUOTES:
        raise UsageError(f"the payload has {size} bytes when it is printed, and max_payload of [jobs] is {max_payload}")


def string_payload(text: str, max_payload: int) -> str:
    """Give the payload that is this text as a JSON string.

    Raises:
        UsageError: it has a NUL in it, or is too large.
    """
    if "\0" in text:
        raise UsageError("the text has a NUL in it (\\u0000), which PostgreSQL's jsonb cannot keep")
    payload = json.dumps(text, ensure_ascii=False)
    if len(payload) * 4 > max_payload and (size := len(payload.encode())) > max_payload + QUOTES:
        raise UsageError(f"the payload has {size} bytes when it is printed, and max_payload of [jobs] is {max_payload}")
    return payload


def verify_utf8(text: str) -> None:
    """Refuse a text of the command line that is none.

    Raises:
        UsageError: bytes of it were no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"character {error.start + 1} is not UTF-8") from None


def _parse(decoder: json.JSONDecoder, text: str) -> Any:
    try:
        return decoder.decode(text)
    except RecursionError:
        refuse_depth()
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {explain(error)}") from None


def explain(error: json.JSONDecodeError) -> str:
    """Say what is wrong with a JSON text and where; the place is that within the text (characters, from 1)."""
    return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos + 1}"


def refuse_depth() -> NoReturn:
    """Refuse what is too deep for one of the readers on the way.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"arrays and objects are more than {DEEPEST} deep")


def _sizes(value: Any) -> Iterator[int]:
    """Walk through a value without recursion, and give the bytes that the server prints for each part of it."""
    rest: list[tuple[Any, int]] = [(value, 1)]
    while rest:
        item, depth = rest.pop()
        if isinstance(item, dict | list) and depth > DEEPEST:
            refuse_depth()
        if isinstance(item, dict):
            yield max(2, len(item) * 4)  # braces, ": " after each key, ", " between them
            for name, part in item.items():
                yield _string_size(name)
                rest.append((part, depth + 1))
        elif isinstance(item, list):
            yield max(2, len(item) * 2)
            rest.extend((part, depth + 1) for part in item)
        elif isinstance(item, _Number):
            yield _number_size(item)
        elif isinstance(item, str):
            yield _string_size(item)
        else:
            yield 5 if item is False else 4  # true, null


def _string_size(text: str) -> int:
    if "\0" in text:
        raise UsageError("a string has a NUL in it (\\u0000), which PostgreSQL's jsonb cannot keep")
    try:
        return len(json.dumps(text, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise UsageError(
            "a string has half of a surrogate pair in it (\\ud800 to \\udfff), which is no character"
        ) from None


def _number_size(text: str) -> int:
    """Count the digits that numeric prints: none is left out, on neither side of the point."""
    found = _NUMBER.fullmatch(text)
    assert found is not None, text  # noqa: S101 -- json has called it a number
    exponent = int(found[4]) if found[4] and len(found[4]) < 10 else 10**9 if found[4] else 0
    if found[3] == "-":
        exponent = -exponent
    whole, part = max(1, len(found[1]) + exponent), max(0, len(found[2] or "") - exponent)
    if whole + part > LONGEST_NUMBER:
        shown = text if len(text) <= 40 else f"{text[:37]}…"
        raise UsageError(f"the number {shown} has more than {LONGEST_NUMBER} digits when it is written out")
    return text.startswith("-") + whole + (part > 0) + part
