"""`batchguard jobs migrate`, and schemas that are not ours, not there, or of another version."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.fixtures.guard import StartRun
from tests.fixtures.queue import ODD_SCHEMA, ForkServer, Queue
from tests.fixtures.server import Server

SHAPE = """
SELECT 'column', attrelid::regclass::text, attname, format_type(atttypid, atttypmod), attnotnull::text,
       pg_get_expr(adbin, adrelid), attidentity::text
  FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
 WHERE attrelid IN (SELECT oid FROM pg_class WHERE relnamespace = {schema} AND relkind = 'r') AND attnum > 0
UNION ALL
SELECT 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid), '', '', '', '' FROM pg_index
 WHERE indrelid IN (SELECT oid FROM pg_class WHERE relnamespace = {schema})
UNION ALL
SELECT 'constraint', conname, pg_get_constraintdef(oid), '', '', '', '' FROM pg_constraint WHERE connamespace = {schema}
UNION ALL
SELECT 'table', relname, array_to_string(reloptions, ','), array_to_string(relacl, ','), '', '', '' FROM pg_class
 WHERE relnamespace = {schema} AND relkind = 'r'
UNION ALL SELECT 'version', version::text, '', '', '', '', '' FROM {version}
ORDER BY 1, 2, 3
"""


def shape(queue: Queue) -> list[tuple[object, ...]]:
    """Give all that makes the schema."""
    quoted = queue.table.removesuffix(".jobs")
    return queue.sql(
        SHAPE.replace("{schema}", "'" + quoted.replace("'", "''") + "'::regnamespace").replace(
            "{version}", f"{quoted}.jobs_version"
        )
    )


def test_a_second_time_changes_nothing(jobs: Queue) -> None:
    """Every object stays the one it was."""
    before = shape(jobs), jobs.sql("SELECT oid, xmin FROM pg_class WHERE relname LIKE 'jobs%%' ORDER BY 1")
    jobs.ok("migrate")
    assert (shape(jobs), jobs.sql("SELECT oid, xmin FROM pg_class WHERE relname LIKE 'jobs%%' ORDER BY 1")) == before


def test_eight_at_once(empty_database: Queue, start: StartRun) -> None:
    """They wait for one another; one makes the schema, and all succeed."""
    runs = [start("jobs", "migrate", "--schema", empty_database.schema, dsn=empty_database.dsn) for _ in range(8)]
    assert [(run.code(), run.err) for run in runs] == [(0, "")] * 8
    assert empty_database.ok("enqueue", "1").out == "1\n"


def run_script(psql: str, dsn: str, script: str) -> None:
    """Let psql carry out a script; every error is one."""
    argv = [psql, "-qX", "-v", "ON_ERROR_STOP=1", dsn]
    subprocess.run(argv, input=script, text=True, check=True, capture_output=True)


@pytest.mark.parametrize("schema", ["dumped", ODD_SCHEMA, "a\nb\\'"])
def test_dumped_sql_makes_the_same(schema: str, server: Server, forkserver: ForkServer) -> None:
    """It runs in psql, twice without harm, and the schema is the one that migrate makes."""
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("psql is not installed: apt-get install postgresql-client")
    queue = Queue(server, server.dsn, schema, forkserver)
    script = queue.ok("migrate", "--dump-sql", dsn="host=nowhere.invalid").out
    try:
        for _ in range(2):  # four at once, and once more
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda _: run_script(psql, server.dsn, script), range(4)))
        dumped = shape(queue)
        server.sql(f"DROP SCHEMA {queue.table.removesuffix('.jobs')} CASCADE")
        queue.ok("migrate")
        assert shape(queue) == dumped
    finally:
        server.sql(f"DROP SCHEMA {queue.table.removesuffix('.jobs')} CASCADE")


def test_without_a_queue(empty_database: Queue) -> None:
    """Every command says what to do."""
    for argv in (
        ("enqueue", "1"),
        ("enqueue", "--lines"),
        ("claim",),
        ("reap",),
        ("stats",),
        ("wait", "1"),
        ("retry", "--all"),
    ):
        done = empty_database(*argv, stdin="1\n")
        assert done.code == 78, done
        assert f'there is no queue in schema "{empty_database.schema}"' in done.err
        assert "batchguard jobs migrate" in done.err


def test_other_versions_are_refused(plain_jobs: Queue) -> None:
    """A newer schema is not touched; an older one asks for migrate."""
    quoted = plain_jobs.table.removesuffix(".jobs")
    plain_jobs.sql(f"UPDATE {quoted}.jobs_version SET version = 99")
    for argv in (("migrate",), ("claim",), ("enqueue", "1")):
        done = plain_jobs(*argv)
        assert done.code == 78
        assert "has version 99, and this batchguard knows 1 at most" in done.err
    plain_jobs.sql(f"UPDATE {quoted}.jobs_version SET version = 0")
    older = plain_jobs("claim")
    assert older.code == 78
    assert "Bring it up to date: batchguard jobs migrate" in older.err
    plain_jobs.ok("migrate")
    plain_jobs.ok("enqueue", "1")


def test_a_strangers_table_is_left_alone(server: Server, forkserver: ForkServer) -> None:
    """A table of that name that batchguard did not make is neither used nor changed."""
    queue = Queue(server, server.dsn, "strangers", forkserver)
    server.sql("CREATE SCHEMA strangers")
    server.sql("CREATE TABLE strangers.jobs (id int)")
    try:
        done = queue("migrate")
        assert done.code == 78
        assert 'has a table "jobs" that batchguard did not make' in done.err
        assert queue.sql(
            "SELECT count(*) FROM pg_attribute WHERE attrelid = 'strangers.jobs'::regclass AND attnum > 0"
        ) == [(1,)]
        assert queue("claim").code == 78
    finally:
        server.sql("DROP SCHEMA strangers CASCADE")


def test_rights_of_who_migrates(server: Server, role: str, forkserver: ForkServer) -> None:
    """Without the right to create a schema it says so; in a schema that a DBA made, that right is not needed."""
    target = conninfo_to_dict(server.dsn)
    dsn = f"host={target['host']} port={target['port']} dbname={target['dbname']} user={role} password=right"
    queue = Queue(server, dsn, "made_by_a_dba", forkserver)
    refused = queue("migrate")
    assert refused.code == 77
    assert "permission denied for database" in refused.err
    server.sql(f"CREATE SCHEMA made_by_a_dba AUTHORIZATION {role}")
    queue.ok("migrate")
    assert queue.ok("enqueue", "1").out == "1\n"


@pytest.mark.slow
def test_a_locked_table_is_waited_for_a_while_and_named(plain_jobs: Queue) -> None:
    """Claims wait for who has locked the whole table, and say so in the end instead of piling up."""
    plain_jobs.put(1)
    with plain_jobs.server.connect() as other, other.transaction():
        other.execute(f"LOCK TABLE {plain_jobs.table}")
        with ThreadPoolExecutor() as pool:
            done = pool.submit(plain_jobs, "claim").result()
    assert done.code == 69
    assert "another transaction keeps a job, a dedupe key or the whole table of the queue" in done.err
    assert "for 10s already (55P03), exit 69. Who: SELECT pid" in done.err
