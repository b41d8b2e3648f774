"""How people are told who holds a lock."""

from dataclasses import replace

from batchguard.core.holder import Holder, describe

RUN = Holder(
    7,
    user="batch",
    application="batchguard run 100:1 daily_sales@bat02",
    by="run",
    host="bat02",
    since_clock="02:00:03",
    held_s=15120.0,
    check_s=5.0,
    ttl_s=60.0,
    silent_s=4.0,
)


def test_run() -> None:
    """A run, with all that is known of it."""
    assert describe(RUN) == "run daily_sales@bat02, since 02:00:03 (4h12m), backend 7, user batch, host bat02"


def test_stranger() -> None:
    """Of others PostgreSQL does not tell when they took a lock."""
    psql = Holder(7, user="tanaka", application="psql", since_clock="02:00:03", held_s=60.0)
    assert describe(psql) == '"psql", since 02:00:03 or before (1m), backend 7, user tanaka'
    assert describe(Holder(7)) == "a session without a name, backend 7"


def test_hold() -> None:
    """A hold, with its end and its reason."""
    held = Holder(7, application="batchguard hold 1:1 ops@b", by="hold", until_clock="06:00 JST", reason="DB移行")
    assert describe(held) == 'on hold by ops@b until 06:00 JST: "DB移行", backend 7'
    assert describe(replace(held, waits=True)) == "hold ops@b, backend 7"


def test_hidden() -> None:
    """What may not be seen is said."""
    assert describe(Holder(7, application="psql", hidden=("since", "host"))) == (
        '"psql", backend 7; since, host hidden: needs pg_monitor'
    )


def test_client_that_may_have_vanished() -> None:
    """A session that misses its checks: when the server frees it, or that it will not."""
    assert "no check" not in describe(replace(RUN, silent_s=13.0))
    assert describe(replace(RUN, silent_s=40.0)).endswith(
        "; no check from it for 40s: if its host is gone, the server frees the lock within 20s"
    )
    assert describe(replace(RUN, silent_s=61.0)).endswith("the server frees the lock at any moment")
    assert describe(replace(RUN, silent_s=90.0)).endswith("though its host answers the server: is the process stopped?")
    assert "no check" not in describe(replace(RUN, silent_s=40.0, waits=True))


def test_prepared_transaction() -> None:
    """A lock that belongs to no session."""
    assert describe(Holder(None)) == "a prepared transaction, see pg_prepared_xacts"
