"""A primary and its standby: whoever is promoted, and whatever becomes of the other, no batch runs twice."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from batchguard.adapters.lock_session import read_server_age
from batchguard.runtime.access import QUERIES
from tests.fixtures.batch import Life, boot_time, command, read_life
from tests.fixtures.cluster import Cluster
from tests.fixtures.guard import Run, StartRun
from tests.fixtures.measure import Measure
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.waiting import until
from tests.fixtures.watch import alive

MakeCluster = Callable[..., Cluster]
WINDOW = 7.5


def start_batch(run: StartRun, dsn: str, file: Path, *options: str) -> Run:
    """Start the batch that ignores TERM, and wait until it lives."""
    running = run("--key", "100:1", *options, "--", *command(file, 600, "--stubborn"), dsn=dsn)
    until(file.exists)
    return running


def start_next(run: StartRun, dsn: str, file: Path) -> Run:
    """Start the same key, settling as by default, with a batch that ends at once."""
    return run("-v", "--key", "100:1", "--settle", "auto", "--", *command(file, 0), dsn=dsn)


@pytest.fixture(params=["plain", "monitor"])
def user(request: pytest.FixtureRequest) -> str:
    """Give a role that may see nothing, and one with pg_monitor."""
    return str(request.param)


def make_roles(cluster: Cluster) -> None:
    """Make both roles, on the primary."""
    cluster.primary.sql("CREATE ROLE plain LOGIN")
    cluster.primary.sql("CREATE ROLE monitor LOGIN IN ROLE pg_monitor")
    cluster.catch_up()


@pytest.fixture
def busy() -> Iterator[Callable[[Cluster], None]]:
    """Fill a primary with dirty buffers, and keep writing until it goes."""
    ending = threading.Event()
    threads: list[threading.Thread] = []

    def write(cluster: Cluster) -> None:
        primary = cluster.primary
        primary.sql("CREATE TABLE filler AS SELECT i, repeat('x', 400) AS text FROM generate_series(1, 200000) AS i")

        def go_on() -> None:
            try:
                with primary.connect() as connection:
                    while not ending.is_set():
                        connection.execute("UPDATE filler SET i = i + 1 WHERE i % 50 = 0")
            except psycopg.Error:
                pass  # the primary is gone: that is what the test is about

        threads.append(threading.Thread(target=go_on))
        threads[-1].start()

    yield write
    ending.set()
    for thread in threads:
        thread.join()


def promote_with_primary_gone(cluster: Cluster) -> None:
    """The primary dies; the standby is promoted."""
    cluster.primary.stop("immediate")
    cluster.promote()


def promote_with_primary_demoted(cluster: Cluster) -> None:
    """A planned switch: the primary stops, its standby is promoted, and it comes back as that one's standby."""
    cluster.primary.stop("fast")
    cluster.promote()
    cluster.follow()


def check_next(first: Life, second: Life, asked: float, measure: Measure, what: str) -> None:
    """See to it that the next command began after the old tree's last sign of life, and a window after the failover."""
    measure("failover", what, dead=f"{first.last - asked:.2f}", next=f"{second.began - asked:.2f}")
    assert first.last < second.began
    assert second.began > asked + WINDOW


@pytest.mark.event("the primary is demoted")
@pytest.mark.parametrize("load", ["idle", "busy"])
@pytest.mark.parametrize("promote", [promote_with_primary_gone, promote_with_primary_demoted], ids=["gone", "demoted"])
def test_promotion(
    promote: Callable[[Cluster], None],
    load: str,
    user: str,
    run: StartRun,
    make_cluster: MakeCluster,
    busy: Callable[[Cluster], None],
    measure: Measure,
    tmp_path: Path,
) -> None:
    """The old run is lost; the next one, on the new primary, starts its command when the old tree is surely dead."""
    cluster = make_cluster(shared_buffers="128MB", checkpoint_timeout="300s", max_wal_size="4GB")
    make_roles(cluster)
    dsn = f"{cluster.dsn} user={user}"
    running = start_batch(run, dsn, tmp_path / "first")
    if load == "busy":
        busy(cluster)
        cluster.catch_up()
    asked = boot_time()
    promote(cluster)
    following = start_next(run, dsn, tmp_path / "second")
    assert following.code() == 0
    assert running.code() == 76
    first, second = read_life(tmp_path / "first"), read_life(tmp_path / "second")
    check_next(first, second, asked, measure, f"{promote.__name__.replace('_', ' ')}, {load}, {user}")
    assert "starting in" in following.err


@pytest.mark.event("cut off by a failover")
def test_promotion_with_primary_cut_off(
    user: str, run: StartRun, make_cluster: MakeCluster, make_proxy: MakeProxy, measure: Measure, tmp_path: Path
) -> None:
    """The primary falls silent and lives on: its guard kills within the window, and the next run outwaits that."""
    cluster = make_cluster()
    make_roles(cluster)
    proxy = make_proxy(cluster.primary.host_and_port)
    ports = f"{proxy.port},{cluster.standby.embedded.port}"
    dsn = make_conninfo(cluster.dsn, port=ports, user=user, connect_timeout=2)
    running = start_batch(run, dsn, tmp_path / "first")
    proxy.freeze()
    asked = boot_time()
    cluster.promote()
    options = ("--connect-timeout", "1")
    following = run(
        "-v", "--key", "100:1", "--settle", "auto", *options, "--", *command(tmp_path / "second", 0), dsn=dsn
    )
    assert following.code() == 0
    assert running.code() == 76
    first, second = read_life(tmp_path / "first"), read_life(tmp_path / "second")
    check_next(first, second, asked, measure, f"promote with primary cut off, {user}")
    proxy.thaw()


@pytest.mark.event("the primary is demoted")
def test_demoted_under_a_living_session(run: StartRun, make_cluster: MakeCluster, tmp_path: Path) -> None:
    """A primary is demoted by a restart, which ends its sessions: lost, dead, and no shield on what is a standby now."""
    cluster = make_cluster()
    running = start_batch(run, cluster.dsn, tmp_path / "first")
    tree = running.tree()
    promote_with_primary_demoted(cluster)
    assert running.code() == 76
    assert alive(tree) == []
    assert cluster.standby.sql("SELECT pg_is_in_recovery()") == [(True,)]
    assert cluster.standby.locks() == []


@pytest.mark.event("the run is refused")
def test_never_on_a_standby(run: StartRun, make_cluster: MakeCluster, tmp_path: Path) -> None:
    """A standby alone is refused in one line; with both hosts named, in either order, the primary is found."""
    cluster = make_cluster()
    refused = run("--key", "100:1", "--", "true", dsn=cluster.standby.dsn)
    assert refused.code() == 78
    port = cluster.standby.embedded.port
    assert refused.err == (
        f"batchguard: cannot guard 100:1: 127.0.0.1:{port} is a standby and its locks exclude nobody. "
        "List all hosts in the dsn, or name the primary. Not started, exit 78.\n"
    )
    for first, second in ((cluster.primary, cluster.standby), (cluster.standby, cluster.primary)):
        dsn = make_conninfo(cluster.dsn, port=f"{first.embedded.port},{second.embedded.port}")
        found = run("--key", "100:1", "--", "sh", "-c", "echo $BATCHGUARD_LOCK_DSN", dsn=dsn)
        assert found.code() == 0
        assert f"port={cluster.primary.embedded.port}" in found.out


def test_a_promotion_is_never_taken_for_older_than_it_is(make_cluster: MakeCluster) -> None:
    """The server dates its checkpoints in whole seconds: just before the next one, nearly a second must not be lost."""
    cluster = make_cluster()
    promote_with_primary_gone(cluster)
    until(lambda: time.time() % 1 > 0.8, every=0.001)
    begun = boot_time()
    cluster.primary.sql("CHECKPOINT")
    [row] = cluster.primary.sql(QUERIES["server_age"])
    age = read_server_age(tuple(None if value is None else str(value) for value in row))
    assert age.promoted_s is not None
    assert age.promoted_s <= boot_time() - begun


@pytest.mark.slow
def test_settling_ends(user: str, run: StartRun, make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Once the promotion is older than the window and a checkpoint is over, nobody waits any more."""
    cluster = make_cluster()
    make_roles(cluster)
    promote_with_primary_gone(cluster)
    promoted = boot_time()
    cluster.primary.sql("CHECKPOINT")
    until(lambda: boot_time() > promoted + WINDOW + 1, within=20)
    following = start_next(run, f"{cluster.dsn} user={user}", tmp_path / "second")
    assert following.code() == 0
    assert "starting in" not in following.err


def check_only_a_plain_role_waits(run: StartRun, cluster: Cluster, folder: Path) -> None:
    """With pg_monitor a start goes through at once; a plain role settles for the promotion."""
    exact = start_next(run, f"{cluster.dsn} user=monitor", folder / "monitor")
    assert exact.code() == 0
    assert "starting in" not in exact.err
    careful = start_next(run, f"{cluster.dsn} user=plain", folder / "plain")
    assert careful.code() == 0
    assert "because the server became the primary" in careful.err


@pytest.mark.slow
def test_a_plain_role_waits_after_each_checkpoint(run: StartRun, make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Long after a promotion a checkpoint still looks like one to a plain role: it waits for nothing, but safely."""
    cluster = make_cluster()
    make_roles(cluster)
    promote_with_primary_gone(cluster)
    promoted = boot_time()
    until(lambda: boot_time() > promoted + WINDOW + 1, within=20)
    cluster.primary.sql("CHECKPOINT")
    check_only_a_plain_role_waits(run, cluster, tmp_path)


@pytest.mark.slow
def test_a_busy_promotion_settles_longer_for_a_plain_role(
    run: StartRun, make_cluster: MakeCluster, busy: Callable[[Cluster], None], tmp_path: Path
) -> None:
    """Until the first checkpoint after a promotion a plain role cannot tell how old it is, and waits; pg_monitor can."""
    cluster = make_cluster(shared_buffers="128MB", checkpoint_timeout="300s", max_wal_size="4GB")
    make_roles(cluster)
    busy(cluster)
    cluster.catch_up()
    promote_with_primary_gone(cluster)
    promoted = boot_time()
    until(lambda: boot_time() > promoted + WINDOW + 1, within=20)
    timeline = cluster.primary.sql(
        "SELECT timeline_id, pg_walfile_name(pg_current_wal_lsn()) FROM pg_control_checkpoint()"
    )
    assert timeline[0][0] == 1
    assert timeline[0][1].startswith("00000002")
    check_only_a_plain_role_waits(run, cluster, tmp_path)


def token(run: StartRun, dsn: str) -> int:
    """Give the fencing token of one more run."""
    made = run("--key", "100:1", "--", "sh", "-c", "echo $BATCHGUARD_TOKEN", dsn=dsn)
    assert made.code() == 0, made.err
    return int(made.out)


def test_token_grows_across_a_synchronous_failover(run: StartRun, make_cluster: MakeCluster) -> None:
    """With a synchronous standby a token is on the standby before its command starts, so that the next is higher."""
    cluster = make_cluster()
    cluster.replicate_synchronously()
    before = [token(run, cluster.dsn) for _ in range(3)]
    cluster.primary.stop("immediate")
    cluster.promote()
    cluster.primary.sql("ALTER SYSTEM RESET synchronous_standby_names")
    cluster.primary.sql("SELECT pg_reload_conf()")
    after = token(run, cluster.dsn)
    assert [*before, after] == sorted({*before, after})


def test_token_may_be_set_back_by_an_asynchronous_failover(run: StartRun, make_cluster: MakeCluster) -> None:
    """What the standby never got is lost, tokens included: a store that remembers the highest then refuses."""
    cluster = make_cluster()
    token(run, cluster.dsn)
    cluster.catch_up()
    cluster.standby.stop("fast")
    before = [token(run, cluster.dsn) for _ in range(5)]
    cluster.primary.stop("immediate")
    cluster.standby.start()
    cluster.promote()
    assert token(run, cluster.dsn) <= max(before)


def test_a_missing_synchronous_standby_stops_the_start(run: StartRun, make_cluster: MakeCluster) -> None:
    """A commit that waits for a standby which is gone is bounded: the command never starts, 69."""
    cluster = make_cluster()
    cluster.replicate_synchronously()
    cluster.standby.stop("fast")
    refused = run("--key", "100:1", "--", "echo", "ran", dsn=cluster.dsn)
    assert refused.code() == 69
    assert refused.out == ""
    assert "within 1s" in refused.err
    cluster.primary.stop("immediate")
