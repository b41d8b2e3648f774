"""Payloads that PostgreSQL can keep and give back, and those that it cannot."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchguard.core.errors import UsageError
from batchguard.core.payload import decode_utf8, string_payload, verify_payload

MIB = 1024**2

GOOD = [
    "null",
    "true",
    "-0",
    "0.1",
    "1e3",
    '""',
    '"\U0001f600 \\ud83d\\ude00 移行"',
    r'"\\u0000 is text here"',
    '"say \\"so\\"\\nand so"',
    "[]",
    " { } ",
    '{"a": {"b": [1, 2.50, {"c": null}]}}',
    "[" * 500 + "]" * 500,
    "12345678901234567890.12345678901234567890",
    "9" * 1000,
    "1e999",
    "0." + "1" * 999,
    json.dumps("x" * (MIB)),
    json.dumps("[" * 1000),
    '"1e5000 in a text, and ' + "7" * 2000 + '"',
]


@pytest.mark.parametrize("text", GOOD, ids=range(len(GOOD)))
def test_accepted(text: str) -> None:
    """JSON of every kind, up to the limits."""
    verify_payload(text, MIB)


REFUSED = {
    "": "not JSON",
    "hello": "not JSON: expecting value at character 1",
    "{'a': 1}": "not JSON: expecting property name enclosed in double quotes at character 2",
    "[1, 2": "not JSON",
    "[1] [2]": "not JSON: extra data at character 5",
    "01": "not JSON",
    "NaN": "NaN is not JSON",
    '{"a": [Infinity]}': "Infinity is not JSON",
    "-Infinity": "-Infinity is not JSON",
    '"a\tb"': "not JSON: invalid control character",
    r'"\u0000"': "NUL",
    r'{"a\u0000": 1}': "NUL",
    r'"\ud800"': "surrogate",
    r'["\udc00\ud800"]': "surrogate",
    r'{"\uDBFF": 1}': "surrogate",
    "[" * 501 + "]" * 501: "more than 500 deep",
    '{"a":' * 501 + "1" + "}" * 501: "more than 500 deep",
    "[" * 100_000 + "]" * 100_000: "more than 500 deep",
    "1e1000": "more than 1000 digits",
    "[1E+1000]": "more than 1000 digits",
    '{"a":1e+0000000000001000}': "more than 1000 digits",
    "1e-1000": "more than 1000 digits",
    "9" * 1001: "more than 1000 digits",
    "9" * 5000: "more than 1000 digits",
    "-0." + "1" * 1000: "more than 1000 digits",
    "1e99999999999999999999": "more than 1000 digits",
    "5" * 990 + "e99": "more than 1000 digits",
    json.dumps("x" * (MIB + 1)): "1048579 bytes when it is printed, and max_payload of .jobs. is 1048576",
    "[" + ",".join(["1e900"] * 1200) + "]": "max_payload",
    "[" + "1," * (MIB // 2 - 100) + "1]": "max_payload",
}


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_refused(text: str) -> None:
    """What jsonb would not take, alter, or blow up; each is told in words."""
    with pytest.raises(UsageError, match=REFUSED[text].replace("(", r"\(")) as caught:
        verify_payload(text, MIB)
    assert len(str(caught.value)) < 200


def test_short_of_a_small_limit() -> None:
    """The size is that of what the server prints: blanks after commas and colons, numbers in full."""
    verify_payload('{"a":[1,2]}', len('{"a": [1, 2]}') - 2)
    with pytest.raises(UsageError, match="13 bytes"):
        verify_payload('{"a":[1,2]}', len('{"a": [1, 2]}') - 3)
    with pytest.raises(UsageError, match="104 bytes"):
        verify_payload("1e103", 101)


def test_utf8() -> None:
    """Bytes that are no text are refused by their place."""
    assert decode_utf8("移行".encode()) == "移行"
    with pytest.raises(UsageError, match=r"byte 3 is not UTF-8 \(0xff\)"):
        decode_utf8(b"ab\xff")


def test_strings() -> None:
    """A text becomes a JSON string, as it is."""
    assert json.loads(string_payload('a"b\\N\t移', MIB)) == 'a"b\\N\t移'
    string_payload("x" * MIB, MIB)
    for text in ("a\0b", "x" * (MIB + 1), "移" * (MIB // 3 + 1)):
        with pytest.raises(UsageError):
            string_payload(text, MIB)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(_json)
def test_quick_and_exact_agree(value: object) -> None:
    """Whatever is JSON is refused for NULs and surrogates alone, by the quick way and by the exact one."""
    text = json.dumps(value)
    has_odd_text = "\\u0000" in text or any(
        0xD800 <= ord(sign) <= 0xDFFF for sign in json.dumps(value, ensure_ascii=False)
    )
    for limit in (MIB, len(text) * 49):  # with the second one the exact way is taken
        try:
            verify_payload(text, max(limit, 500))
        except UsageError:
            assert has_odd_text
        else:
            assert not any(0xD800 <= ord(sign) <= 0xDFFF for sign in json.dumps(value, ensure_ascii=False))
