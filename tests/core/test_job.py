"""Jobs as lines, and what became of them."""

import json

import pytest

from batchguard.core.errors import UsageError
from batchguard.core.job import Claim, ClaimedJob, Ending, Result, clean_error, group_claims, read_claim, results_of
from batchguard.core.job_settings import build_job_settings, read_job_setting

JOB = ClaimedJob(7, "t", "q", 0, 1, 5, "2026", "2027", 60.0, None, "s.jobs:7:2026", '{"n": 1.10}')


def test_a_claims_line_can_be_fed_back() -> None:
    """The payload is written to the digit, and does not disturb who reads the line for its token."""
    assert '"payload": {"n": 1.10}}' in JOB.to_line()
    assert read_claim(JOB.to_line(), "complete") == Claim(7, "t")
    huge = JOB.to_line().replace("1.10", "9" * 6000)
    assert read_claim(huge, "complete") == Claim(7, "t")


def test_what_the_verb_does_not_read_is_ignored() -> None:
    """Lines of any origin can be fed to any verb; and a payload of any depth is passed over."""
    odd = json.dumps({"id": 7, "claim_token": "t", "retry": "x", "lease": 0, "error": 5})
    assert read_claim(odd, "complete") == read_claim(odd, "release") == Claim(7, "t")
    timed = json.dumps({"id": 7, "claim_token": "t", "retry": "x", "lease": "2h"})
    assert read_claim(timed, "extend", Ending(lease=1.0)) == Claim(7, "t", Ending(lease=7200.0))
    deep = JOB.to_line().replace('{"n": 1.10}', "[" * 5000 + "]" * 5000)
    assert read_claim(deep, "complete") == Claim(7, "t")


@pytest.mark.parametrize(
    ("more", "ending"),
    [
        ({}, Ending(exit_code=3)),
        ({"retry": False}, Ending(is_final=True, exit_code=3)),
        ({"retry": True, "retry_in": "1.5m"}, Ending(retry_in=90.0, exit_code=3)),
        ({"retry_in": 0}, Ending(retry_in=0.0, exit_code=3)),
        ({"retry_in": 2.5, "exit_code": None}, Ending(retry_in=2.5, exit_code=3)),
        ({"exit_code": 255, "error": " a\0b "}, Ending(exit_code=255, error="a\\x00b")),
        ({"lease": 0, "other": [1]}, Ending(exit_code=3)),
    ],
)
def test_lines_say_how_it_ended(more: dict[str, object], ending: Ending) -> None:
    """What a line says counts; else what the options say."""
    line = json.dumps({"id": "7", "claim_token": "t", **more})
    assert read_claim(line, "fail", Ending(exit_code=3)) == Claim(7, "t", ending)


@pytest.mark.parametrize(
    "line",
    [
        "", "x", "[7]", '{"id": 7}', '{"claim_token": "t"}', '{"id": 0, "claim_token": "t"}', '{"id": -1, "claim_token": "t"}',
        '{"id": true, "claim_token": "t"}', '{"id": 1.5, "claim_token": "t"}', '{"id": 9223372036854775808, "claim_token": "t"}',
        '{"id": 7, "claim_token": ""}', '{"id": 7, "claim_token": 5}', '{"id": 7, "claim_token": "a\\nb"}',
        '{"id": 7, "claim_token": "t", "retry": "no"}', '{"id": 7, "claim_token": "t", "retry_in": -1}',
        '{"id": 7, "claim_token": "t", "exit_code": 256}', '{"id": 7, "claim_token": "t", "lease": 0}',
        '{"id": 7, "claim_token": "t", "error": 5}', '{"id": "\u0663", "claim_token": "t"}', "[" * 100000,
    ],
)  # fmt: skip
def test_lines_that_are_none(line: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(UsageError):
        read_claim(line, "extend" if "lease" in line else "fail")


def test_what_one_statement_can_do_is_put_together() -> None:
    """By token and ending, in the order of ids, each once."""
    bad = Ending(is_final=True)
    claims = [Claim(3, "a"), Claim(1, "a"), Claim(2, "b"), Claim(1, "a"), Claim(4, "a", bad)]
    assert group_claims(claims) == [("a", Ending(), [1, 3]), ("b", Ending(), [2]), ("a", bad, [4])]


def test_results() -> None:
    """Changed now, already before, or lost: by what the row is and whether the token is still on it."""
    words = {
        "complete": ["done", "already", "lost", "lost", "lost"],
        "fail": ["retrying", "lost", "already", "already", "lost"],
        "release": ["released", "lost", "already", "lost", "lost"],
        "extend": ["extended", "lost", "lost", "lost", "lost"],
    }
    after = {"complete": "done", "fail": "pending", "release": "pending", "extend": "running"}
    for verb, expected in words.items():
        recalled = {2: "done", 3: "pending", 4: "failed"}
        found = results_of(verb, range(1, 6), {1: after[verb]}, recalled)  # type: ignore[arg-type]  # its key
        assert found == [Result(id_, word) for id_, word in enumerate(expected, 1)]


def test_error_texts_are_cleaned_and_cut() -> None:
    """No NUL, no half characters, the end of it."""
    assert clean_error("  \n") is None
    assert clean_error("a\0b\udc80") == "a\\x00b\\udc80"
    assert clean_error("\x1b[2Jgone\a\n\tyes\x9b") == "\\x1b[2Jgone\\x07\n\tyes\\x9b"
    kept = clean_error("移" * 5000) or ""
    assert len(kept.encode()) <= 4096
    assert set(kept) == {"移"}


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("schema", 'a "b"', 'a "b"'), ("queue", "移行", "移行"), ("lease", "90s", 90.0), ("max_attempts", 1, 1),
        ("backoff", 0, 0.0), ("max_payload", "512KiB", 524288), ("max_payload", "1 mb", 1000000), ("max_payload", 5, 5),
    ],
)  # fmt: skip
def test_settings(name: str, value: object, read: object) -> None:
    """What [jobs] may say."""
    assert read_job_setting(name, value) == read
    assert getattr(build_job_settings({}, {name: read}), name) == read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", ""), ("schema", "pg_x"), ("schema", "x" * 64), ("schema", "a\0"), ("schema", 5), ("schema", "information_schema"),
        ("queue", ""), ("queue", "a\nb"), ("queue", "x" * 64), ("lease", 0), ("lease", "soon"), ("lease", float("nan")),
        ("max_attempts", 0), ("max_attempts", True), ("max_attempts", "5"), ("max_attempts", 2**31),
        ("max_payload", 0), ("max_payload", "1TB"), ("max_payload", "1GiB"), ("max_payload", True), ("backoff", -1),
    ],
)  # fmt: skip
def test_settings_that_are_none(name: str, value: object) -> None:
    """Nothing is guessed."""
    with pytest.raises(UsageError):
        read_job_setting(name, value)
