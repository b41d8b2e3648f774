"""What a line of --jsonl may say."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchguard.core.envelope import NewJob, read_envelope, read_run_at
from batchguard.core.errors import UsageError

DEFAULTS = NewJob(payload="", queue="default")


def read(text: str) -> NewJob:
    """Read a line."""
    return read_envelope(text, DEFAULTS, 1024**2)


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ('{"payload": 1.50}', NewJob("1.50", "default")),
        ('\t{ "payload" :\n{"a":1e2}\t, "queue" : "mail" }\r\n', NewJob('{"a":1e2}', "mail")),
        ('{"dedupe_key":"k","payload":[]}', NewJob("[]", "default", dedupe_key="k")),
        (r'{"payl\u006fad": "x"}', NewJob('"x"', "default")),
        ('{"payload":1,"priority":-32768,"max_attempts":1}', NewJob("1", "default", -32768, None, 1)),
        ('{"payload":1,"run_at":"2026-12-24T06:00:00z"}', NewJob("1", "default", 0, "2026-12-24T06:00:00+00:00")),
        ('{"payload":1,"queue":null,"dedupe_key":null,"priority":null}', NewJob("1", "default")),
        ('{"payload": ' + "9" * 900 + "}", NewJob("9" * 900, "default")),
    ],
)
def test_accepted(text: str, job: NewJob) -> None:
    """The payload stays as it is written; null is as good as absent."""
    assert read(text) == job


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not an object"),
        ("17", "not an object"),
        ('[{"payload": 1}]', "not an object"),
        ("{}", "payload is missing"),
        ('{"queue": "a"}', "payload is missing"),
        ('{"payload": 1', "expecting ',' or '}'"),
        ('{"payload": 1,}', "expecting property name|expecting value|expecting a name"),
        ('{"payload": 1} x', "extra data at character 16"),
        ('{"payload" 1}', "expecting a name in quotes and ':'"),
        ("{payload: 1}", "not JSON"),
        ('{"payload": 1, "payload": 2}', '"payload" stands there twice'),
        ('{"payload": 1, "Queue": "a"}', '"Queue" is not one of payload, queue, priority'),
        ('{"payload": NaN}', "NaN is not JSON"),
        (r'{"payload": "\u0000"}', "NUL"),
        ('{"payload": 1e1000}', "more than 1000 digits"),
        ('{"payload": ' + "[" * 100_000, "more than 500 deep"),
        ('{"payload": 1, "queue": ""}', "queue: '' is not the name of a queue"),
        ('{"payload": 1, "queue": "' + "移" * 22 + '"}', "1 to 63 bytes"),
        (r'{"payload": 1, "queue": "a\nb"}', "no control characters"),
        ('{"payload": 1, "queue": 7}', "is not the name of a queue"),
        ('{"payload": 1, "priority": 1.5}', "priority: '1.5' is not a priority"),
        ('{"payload": 1, "priority": true}', "priority: True is not a priority"),
        ('{"payload": 1, "priority": 32768}', "from -32768 to 32767"),
        ('{"payload": 1, "priority": ' + "9" * 5000 + "}", "is not a priority"),
        ('{"payload": 1, "max_attempts": 0}', "the first run counts"),
        ('{"payload": 1, "dedupe_key": ""}', "text of 1 to 512 bytes"),
        ('{"payload": 1, "dedupe_key": "' + "k" * 513 + '"}', "text of 1 to 512 bytes"),
        (r'{"payload": 1, "dedupe_key": "\u0000"}', "is not a dedupe key"),
        (r'{"payload": 1, "dedupe_key": "\ud800"}', "is not a dedupe key"),
        ('{"payload": 1, "run_at": "now"}', "is not a time with an offset"),
        ('{"payload": 1, "run_at": 1767225600}', "is not a time with an offset"),
    ],
)
def test_refused(text: str, why: str) -> None:
    """Each fault in words, short enough for a line."""
    with pytest.raises(UsageError, match=why) as caught:
        read(text)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "text",
    ["2026-12-24", "2026-12-24T06:00:00", "20261224T060000Z", "2026-W01-1T00:00Z", "today", "infinity", "", "2026-02-30T00:00:00Z",
     "0001-01-01T00:00:00+09:00", "2026-12-24T24:01:00Z", "2026-12-24T06:00:00 JST",
     "2026-12-24T06:00:00+20:00"],
)  # fmt: skip
def test_times_that_are_none(text: str) -> None:
    """Without an offset, or not in the calendar: PostgreSQL would take some of them for something else."""
    with pytest.raises(UsageError):
        read_run_at(text)


@pytest.mark.parametrize(
    "text",
    [
        "2026-12-24T06:00:00+09:00",
        "2026-12-24T06:00:00+0900",
        "2026-12-24T06:00:00-03",
        "2026-12-24 06:00Z",
        "2026-12-24t06:00:00.123456-03:30",
    ],
)
def test_times(text: str) -> None:
    """RFC 3339."""
    assert read_run_at(text)[:16] == text[:16].upper().replace(" ", "T")


_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)


@given(_value, st.sampled_from([None, ", ", " ,\t"]), st.booleans())
def test_payload_is_cut_out_whole(value: Any, separator: str | None, last: bool) -> None:
    """Wherever it stands and however it is written, the payload is what the whole line says it is."""
    try:
        text = json.dumps(value, separators=(separator or ",", ":"), ensure_ascii=last)
        line = f'{{"queue":"q","payload":{text}}}' if last else f'{{"payload":{text} , "queue" : "q"}}'
        assert read(line).payload == text
    except UsageError as error:
        assert "NUL" in str(error)  # noqa: PT017 -- a key may have one
