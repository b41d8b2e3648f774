"""What a lock session says and how answers read."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchguard.adapters.lock_session import application_name, comment, keepalive_settings, read_comment, read_holder
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


def row(application: str | None, query: str | None = None, *, hidden: bool = False) -> list[str | None]:
    """Make a line of `locks`: an exclusive lock 1:1 that is held."""
    about = [application, query, None, None, None, "t" if hidden else "f", None, None]
    return ["1", "1", "2", "ExclusiveLock", "t", "7", "u", *about]


def test_holder_that_may_not_be_seen() -> None:
    """Of another role's session only pid, user and application are known, and it is said that the rest is hidden."""
    holder = read_holder(row("batchguard run 1:1 job@h", hidden=True))
    assert (holder.by, holder.title, holder.since, holder.held_s) == ("run", "job@h", None, None)
    assert holder.hidden == ("since", "host", "run_id", "reason", "until", "window_s")
    assert read_holder(row(None)).by == "other"


def test_what_others_say_is_one_harmless_line() -> None:
    """A session may say anything of itself: no escape reaches a terminal, no number is taken for one that is none."""
    said = {"reason": "a\x1b[2Jb\nc", "window_s": 1e300, "since": "yesterday", "host": ["x"], "until": "9999-13-01"}
    holder = read_holder(row("batchguard hold 1:1 o@h", comment(said) + "SELECT 1"))
    assert holder.reason == "a?[2Jb?c"
    assert (holder.window_s, holder.since, holder.host, holder.until) == (None, None, None, None)


def test_long_keys_do_not_cut_off_who_it_is() -> None:
    """The name of a session is ASCII of at most 63 bytes, and ends with who it is."""
    assert application_name("run", "100:1 daily_sales", "@bat01") == "batchguard run 100:1 daily_sales@bat01"
    name = application_name("hold", ",".join(f"100:{number}" for number in range(50)), " ops@bat01")
    assert len(name) == 63
    assert name.endswith(".. ops@bat01")
    assert application_name("run", "日次", "@bat01") == "batchguard run ??@bat01"
