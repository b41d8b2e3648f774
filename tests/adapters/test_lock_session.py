"""What a lock session says and how answers read."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchguard.adapters.lock_session import comment, keepalive_settings, read_comment, read_holder
from tests.fixtures.server import Server

facts = st.dictionaries(st.text(max_size=10), st.text() | st.text("/*\\") | st.integers() | st.none(), max_size=5)


@given(facts)
def test_comment_reads_back_and_cannot_be_left(values: dict[str, Any]) -> None:
    """Whatever the facts hold, the comment neither ends early nor opens another."""
    text = comment(values)
    inner = text.removeprefix("/* ").removesuffix(" */ ")
    assert "*/" not in inner
    assert "/*" not in inner
    assert read_comment(text + "SELECT 1") == values


def test_comment_is_one_for_the_server(server: Server) -> None:
    """PostgreSQL agrees where the comment ends, and shows it as it was."""
    text = comment({"reason": "移行 */ ; /* -- '", "key": "100:1"})
    with server.connect() as psql:
        [(query,)] = psql.execute(text + "SELECT query FROM pg_stat_activity WHERE pid = pg_backend_pid()").fetchall()
    assert read_comment(query) == {"reason": "移行 */ ; /* -- '", "key": "100:1"}


@pytest.mark.parametrize(
    "query", [None, "", "SELECT 1", '/* batchguard {"cut": "of', "/* batchguard {} */", "<insufficient privilege>"]
)
def test_what_is_not_ours_reads_as_nothing(query: str | None) -> None:
    """Hidden, cut off or foreign texts give no facts."""
    assert read_comment(query) == {}


@given(st.floats(min_value=1, max_value=86400))
def test_keepalives_never_give_up_before_the_ttl(ttl: float) -> None:
    """Neither the probes nor the user timeout end a session earlier than the ttl."""
    idle, interval, count, user_timeout_ms = keepalive_settings(ttl)
    assert idle + interval * count >= ttl
    assert user_timeout_ms >= ttl * 1000
    assert min(idle, interval, count) >= 1


def test_holder_that_may_not_be_seen() -> None:
    """Of another role's session only pid, user and application are known."""
    holder = read_holder(["7", "u", "batchguard run 1:1 job@h", None, None, None, None])
    assert (holder.by, holder.title, holder.since, holder.held_s) == ("run", "job@h", None, None)
    assert read_holder(["7", None, None, None, None, None, None]).by == "other"
