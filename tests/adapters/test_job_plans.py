"""The statements of workers, at 300 000 rows: walks along indexes, whatever the statistics say."""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from batchguard.adapters.job_store import statements_in
from batchguard.adapters.postgres import load_queries
from tests.fixtures.queue import ForkServer, Queue
from tests.fixtures.server import Server

ROWS = """
INSERT INTO {jobs} (payload, queue, priority, run_at, status, claim_token, claimed_until, attempts, finished_at, dedupe_key)
SELECT '{"n": 1}', CASE WHEN n % 10 = 0 THEN 'mail' ELSE 'default' END, n % 5,
       CASE kind WHEN 'delayed' THEN now() + interval '1 day' WHEN 'due' THEN now() - interval '1 minute' END,
       CASE kind WHEN 'done' THEN 'done' WHEN 'failed' THEN 'failed' WHEN 'running' THEN 'running' WHEN 'expired' THEN 'running'
                 ELSE 'pending' END,
       CASE WHEN kind IN ('running', 'expired') THEN 't' END,
       CASE kind WHEN 'running' THEN now() + interval '1 hour' WHEN 'expired' THEN now() - interval '1 hour' END,
       1, CASE WHEN kind IN ('done', 'failed') THEN now() END, CASE WHEN n % 7 = 0 THEN 'k' || n END
  FROM (SELECT n, CASE WHEN n <= 300 THEN 'running' WHEN n <= 600 THEN 'expired' WHEN n <= 1600 THEN 'failed'
                       WHEN n <= 3600 THEN 'due' WHEN n <= 100000 THEN 'delayed' WHEN n <= 200000 THEN 'ready'
                       ELSE 'done' END AS kind
          FROM generate_series(1, 300000) AS n) AS kinds
"""
FEW = list(range(1, 301, 3))
STATEMENTS: dict[str, list[Any]] = {
    "claim": ["default", 100, "t2", 60, "host", 1048576],
    "complete": [FEW, "t"],
    "fail": [FEW, "t", False, None, 10, 3600, 1, "exit", "no"],
    "release": [FEW, "t"],
    "extend": [FEW, "t", 60],
    "recall": [FEW, "t"],
    "reap": [100, 10, 3600],
    "claimed": ["t"],
    "retry_ids": [list(range(700, 800))],
    "cancel": [FEW],
    "failed_ids": ["default", 0, 1000],
    "purge_done": [0, 5000],
}
FORBIDDEN = {"Seq Scan", "Sort", "Incremental Sort", "Hash", "Hash Join", "Merge Join"}
MAY_SORT = {"retry_ids", "purge_done"}
"""What operators start may sort what it has found; what workers do all day may not."""

BEFORE = {
    "fresh": "",
    "statistics of the empty table": "ANALYZE {jobs}",
    "statistics of one row": "INSERT INTO {jobs} (payload) VALUES ('1'); ANALYZE {jobs}",
    "statistics of all done": "INSERT INTO {jobs} (payload, status, finished_at) SELECT '1', 'done', now() FROM generate_series(1, 10000); "
    "ANALYZE {jobs}",
}


@pytest.fixture(scope="module", params=[*BEFORE, "statistics of these rows"])
def full(request: pytest.FixtureRequest, _shared_server: Server, forkserver: ForkServer) -> Iterator[Queue]:
    """Give a full table whose statistics are those of an earlier time."""
    queue = Queue(_shared_server, _shared_server.dsn, "planned", forkserver)
    queue.ok("migrate")
    queue.sql("ALTER TABLE {jobs} SET (autovacuum_enabled = off)")
    for statement in BEFORE.get(request.param, "").split(";"):
        if statement.strip():
            queue.sql(statement)
    queue.sql(ROWS)
    if request.param not in BEFORE:
        queue.sql("ANALYZE {jobs}")
    yield queue
    queue.sql("DROP SCHEMA planned CASCADE")


def explain(connection: psycopg.Connection[Any], name: str, *options: str) -> dict[str, Any]:
    """Give the plan of a statement that was prepared; it is not carried out for good."""
    values = connection.execute(
        "SELECT " + ", ".join(["%s::text"] * len(STATEMENTS[name])), [_literal(value) for value in STATEMENTS[name]]
    ).fetchone()
    assert values is not None
    arguments = ", ".join(
        "NULL" if value is None else psycopg.sql.Literal(value).as_string(connection) for value in values
    )
    with connection.transaction(force_rollback=True):
        row = connection.execute(
            f"EXPLAIN ({', '.join(['FORMAT JSON', *options])}) EXECUTE {name} ({arguments})"
        ).fetchone()
    assert row is not None
    plan: dict[str, Any] = row[0][0]["Plan"]
    return plan


def _literal(value: Any) -> str | None:
    if isinstance(value, list):
        return "{" + ",".join(map(str, value)) + "}"
    return None if value is None else str(value)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Walk through a plan."""
    yield plan
    for below in plan.get("Plans", []):
        yield from nodes(below)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_plans(mode: str, full: Queue) -> None:
    """No scan of the table, no sort, no hash, no merge; a claim reads a bounded number of buffers."""
    with full.server.connect() as connection:
        connection.execute(f"SET plan_cache_mode = {mode}")
        for name, text in statements_in(load_queries("jobs"), full.schema).items():
            if name not in STATEMENTS:
                continue
            connection.execute(f"PREPARE {name} AS {text}".encode())
            plan = explain(connection, name)
            found = {
                node["Node Type"]
                for node in nodes(plan)
                if node["Node Type"] in FORBIDDEN and node.get("Relation Name", "jobs") == "jobs"
            }
            assert not found - ({"Sort", "Incremental Sort"} if name in MAY_SORT else set()), (
                name,
                json.dumps(plan, indent=1),
            )
        plan = explain(connection, "claim", "ANALYZE", "BUFFERS")
        assert plan["Actual Rows"] == 100
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 200 + 30 * 100
