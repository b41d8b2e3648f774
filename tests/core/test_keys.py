"""Lock keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchguard.core.errors import TableError
from batchguard.core.keys import INT4, INT8, KeyRange, bigint, key_in_pg_locks, keys_of, order_keys, pair, parse_numbers


@given(st.integers(INT4.start, INT4.stop - 1), st.integers(INT4.start, INT4.stop - 1))
def test_pair_reads_back(category: int, number: int) -> None:
    """Every pair of int4 is written as it is read, and shown unsigned by pg_locks."""
    key = pair(category, number)
    assert parse_numbers(str(key)) == key
    classid, objid, objsubid = key.in_pg_locks
    assert (classid - category) % 2**32 == (objid - number) % 2**32 == 0
    assert objsubid == 2
    assert key_in_pg_locks(classid, objid, objsubid) == key


@given(st.integers(INT8.start, INT8.stop - 1))
def test_bigint_reads_back(number: int) -> None:
    """Every int8 is written as it is read; pg_locks shows its halves."""
    key = bigint(number)
    assert parse_numbers(str(key)) == key
    classid, objid, objsubid = key.in_pg_locks
    assert ((classid << 32 | objid) - number) % 2**64 == 0
    assert objsubid == 1
    assert key_in_pg_locks(classid, objid, objsubid) == key


def test_range() -> None:
    """A range counts up, negative numbers included."""
    assert parse_numbers("100:10..12") == KeyRange(100, 10, 12)
    assert [str(key) for key in keys_of(KeyRange(-3, -1, 1))] == ["-3:-1", "-3:0", "-3:1"]
    assert str(KeyRange(-3, -5, -1)) == "-3:-5..-1"


@pytest.mark.parametrize("name", ["daily_sales", "a:b", "100:", "bigint:", "", "100:1..", "1:2:3", "１００:1"])
def test_not_numbers(name: str) -> None:
    """What is not written in numbers may be a name."""
    assert parse_numbers(name) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("100", 'key "100" is one number; write 100:ID, or bigint:100 for the other number space.'),
        ("1:99999999999", "does not fit int4"),
        ("-2147483649:1", "does not fit int4"),
        ("bigint:9223372036854775808", "does not fit int8"),
        ("100:12..10", "must count upwards"),
        ("100:1..5000", "at most 1000 slots"),
    ],
)
def test_refused(text: str, message: str) -> None:
    """Numbers that are no key are refused, and the message says what to write."""
    with pytest.raises(TableError) as caught:
        parse_numbers(text)
    assert message in str(caught.value)


@given(st.permutations([pair(1, 2), pair(1, 1), bigint(5), KeyRange(0, 7, 9), pair(-1, -1), pair(1, 1)]))
def test_order_does_not_depend_on_the_command_line(keys: list[object]) -> None:
    """However they are written, keys are taken in one order, each once."""
    assert order_keys(keys) == order_keys(sorted(keys, key=str))  # type: ignore[arg-type]
    assert len(order_keys(keys)) == 5  # type: ignore[arg-type]


def test_range_and_a_key_inside_it() -> None:
    """The same lock may not be asked for twice."""
    with pytest.raises(TableError, match="both contain 100:11"):
        order_keys([KeyRange(100, 10, 12), pair(100, 11)])
