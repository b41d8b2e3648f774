-- The queue. {schema} stands for the quoted schema. Each statement is a transaction of its own, planned for its
-- parameters, and usable through a pooler that changes sessions between transactions. Tokens and ids are the client's;
-- all times are the server's.

-- name: session_facts
-- Whether the session is ours alone (a pooler reports a backend that is not the one that answers).
SELECT pg_backend_pid(), pg_is_in_recovery()

-- name: begin
-- What a role's defaults say about isolation and writing does not count here.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE

-- name: prepare
-- Nobody waits for ever for a table lock (SKIP LOCKED does not skip those), and only the time limits that are ours
-- count. $3 says whether it is for this transaction alone. search_path stays: every name of ours is qualified, and a
-- trigger that somebody put on the table may rely on it.
SELECT set_config('lock_timeout', $1, $3), set_config('statement_timeout', $2, $3),
       set_config('idle_in_transaction_session_timeout', '0', $3),
       set_config('idle_session_timeout', '0', $3)

-- name: prepare_own
-- The same for a session of our own, where isolation is a default as well.
SELECT set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_read_only', 'off', false),
       set_config('default_transaction_deferrable', 'off', false)

-- name: prepare_transaction
-- PostgreSQL 17 has one limit more.
SELECT set_config('transaction_timeout', '0', $1)

-- name: commit
-- The end.
COMMIT

-- name: rollback
-- The end after an error.
ROLLBACK

-- name: version
-- The version of the schema; readable for whoever may use the schema.
SELECT version FROM {schema}.jobs_version

-- name: look_for_schema
-- What is there already: the schema, a table of our name, our version row's table.
SELECT to_regnamespace($1) IS NOT NULL,
       EXISTS (SELECT FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relname = 'jobs'),
       EXISTS (SELECT FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relname = 'jobs_version')

-- name: lock_migration
-- One migration of a schema at a time; released with the transaction.
SELECT pg_advisory_xact_lock(hashtextextended('batchguard jobs migrate ' || $1, 0))

-- name: create_schema
-- Only where there is none: IF NOT EXISTS would ask for the right to create one all the same.
CREATE SCHEMA {schema}

-- name: create_version
-- One row.
CREATE TABLE IF NOT EXISTS {schema}.jobs_version (
    version integer NOT NULL,
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only)
);
GRANT SELECT ON {schema}.jobs_version TO PUBLIC

-- name: set_version
-- Never back.
INSERT INTO {schema}.jobs_version (version) VALUES ({version})
    ON CONFLICT (is_only) DO UPDATE SET version = greatest(jobs_version.version, excluded.version)

-- name: enqueue_one
-- A dedupe key that is in use gives no row.
INSERT INTO {schema}.jobs (payload, queue, priority, run_at, max_attempts, dedupe_key)
VALUES ($1::jsonb, $2, $3::smallint, $4::timestamptz, $5::integer, $6)
    ON CONFLICT DO NOTHING
RETURNING id

-- name: enqueue_blindly
-- The same for a role that may not read ids: whether there is a row now.
WITH enqueued AS (
    INSERT INTO {schema}.jobs (payload, queue, priority, run_at, max_attempts, dedupe_key)
    VALUES ($1::jsonb, $2, $3::smallint, $4::timestamptz, $5::integer, $6)
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT count(*) FROM enqueued

-- name: find_duplicate
-- The job that has the key.
SELECT id, status FROM {schema}.jobs
 WHERE queue = $1 AND dedupe_key = $2 AND status IN ('pending', 'running')

-- name: from_now
-- A moment by the server's clock.
SELECT to_json(now() + make_interval(secs => $1::float8)) #>> '{}'

-- name: copy_jobs
-- Without keys there can be no duplicate.
COPY {schema}.jobs (payload, queue, priority, run_at, max_attempts, dedupe_key) FROM STDIN

-- name: create_incoming
-- Where jobs with keys come first: COPY itself would die of one duplicate.
CREATE TEMPORARY TABLE batchguard_incoming (
    place bigint GENERATED ALWAYS AS IDENTITY,
    payload jsonb, queue text, priority smallint, run_at timestamptz, max_attempts integer, dedupe_key text
) ON COMMIT DROP

-- name: copy_incoming
-- The lines as they came.
COPY pg_temp.batchguard_incoming (payload, queue, priority, run_at, max_attempts, dedupe_key) FROM STDIN

-- name: enqueue_incoming
-- In the order of the lines; of several with one key the first counts.
WITH enqueued AS (
    INSERT INTO {schema}.jobs (payload, queue, priority, run_at, max_attempts, dedupe_key)
    SELECT payload, queue, priority, run_at, max_attempts, dedupe_key
      FROM pg_temp.batchguard_incoming ORDER BY place
        ON CONFLICT DO NOTHING
    RETURNING 1)
SELECT count(*) FROM enqueued

-- name: claim
-- Up to $2 jobs of one queue. Those whose time has come get at most half while others are ready, and an odd half goes
-- up or down at random, so that neither side starves. The array keeps the plan a walk over the primary key, and the
-- locks do not skip what an open transaction merely refers to. A payload larger than $6 comes as NULL; with -1 neither
-- payloads nor dedupe keys come.
WITH due AS MATERIALIZED (
    SELECT id FROM {schema}.jobs
     WHERE queue = $1 AND status = 'pending' AND run_at IS NOT NULL AND run_at <= now()
     ORDER BY run_at, id LIMIT $2::bigint FOR NO KEY UPDATE SKIP LOCKED
), ready AS MATERIALIZED (
    SELECT id FROM {schema}.jobs
     WHERE queue = $1 AND status = 'pending' AND run_at IS NULL
     ORDER BY priority, created_at, id
     LIMIT $2::bigint - least((SELECT count(*) FROM due), ($2::bigint + (random() < 0.5)::integer) / 2)
       FOR NO KEY UPDATE SKIP LOCKED
), pick AS MATERIALIZED (
    SELECT id FROM ready
     UNION ALL
    (SELECT id FROM due LIMIT $2::bigint - (SELECT count(*) FROM ready))
), claimed AS (
    UPDATE {schema}.jobs
       SET status = 'running', claim_token = $3, claimed_until = clock_timestamp() + make_interval(secs => $4::float8),
           attempts = attempts + 1, claimed_by = $5
     WHERE id = ANY (ARRAY (SELECT id FROM pick))
    RETURNING id, queue, priority, attempts, max_attempts, created_at, claimed_until,
              CASE WHEN $6::bigint >= 0 THEN dedupe_key END AS dedupe_key,
              CASE WHEN $6::bigint >= 0 THEN payload::text END AS printed
)
SELECT id, queue, priority, attempts, max_attempts,
       to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       to_char(claimed_until AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       dedupe_key,
       CASE WHEN octet_length(printed) <= $6::bigint THEN printed END
  FROM claimed

-- name: claimed
-- What a claim got whose answer was lost, without payloads and dedupe keys.
SELECT id, queue, priority, attempts, max_attempts,
       to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       to_char(claimed_until AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       NULL, NULL
  FROM {schema}.jobs
 WHERE status = 'running' AND claim_token = $1

-- name: payload
-- One payload, NULL when it is larger than $3; and the dedupe key.
SELECT CASE WHEN octet_length(printed) <= $3::bigint THEN printed END, dedupe_key
  FROM (SELECT payload::text AS printed, dedupe_key FROM {schema}.jobs WHERE id = $1 AND claim_token = $2 OFFSET 0) AS one

-- name: own
-- How the next four begin: our own running ones, locked in the order of their ids ($1 is sorted), since two who end the
-- same jobs must not lock one another out.
WITH own AS MATERIALIZED (
    SELECT job.id FROM unnest($1::bigint[]) AS wanted (id),
           LATERAL (SELECT id FROM {schema}.jobs
                     WHERE jobs.id = wanted.id AND status = 'running' AND claim_token = $2
                       FOR NO KEY UPDATE) AS job
)

-- name: complete
-- Done.
{own}
UPDATE {schema}.jobs
   SET status = 'done', finished_at = clock_timestamp(), claimed_until = NULL,
       exit_code = NULL, reason = NULL, last_error = NULL
 WHERE id = ANY (ARRAY (SELECT id FROM own))
RETURNING id, status

-- name: fail
-- Back for another attempt after a pause that doubles, or failed: for good ($3), or after the last attempt. $4 is the
-- pause where it was said (seconds); of the doubled one a quarter is left to chance, so that jobs that failed together
-- do not come back together.
{own}
UPDATE {schema}.jobs
   SET status = CASE WHEN $3::boolean OR attempts >= max_attempts THEN 'failed' ELSE 'pending' END,
       finished_at = CASE WHEN $3::boolean OR attempts >= max_attempts THEN clock_timestamp() END,
       run_at = CASE WHEN $3::boolean OR attempts >= max_attempts THEN run_at
                     ELSE clock_timestamp() + make_interval(secs => coalesce($4::float8,
                          least($6::float8, $5::float8 * 2.0 ^ least(greatest(attempts - 1, 0), 60))
                          * (1 - 0.25 * random()))) END,
       claimed_until = NULL, exit_code = $7::integer, reason = $8, last_error = $9
 WHERE id = ANY (ARRAY (SELECT id FROM own))
RETURNING id, status

-- name: release
-- Back to its place, as if it had not been claimed.
{own}
UPDATE {schema}.jobs
   SET status = 'pending', claimed_until = NULL, attempts = greatest(attempts - 1, 0)
 WHERE id = ANY (ARRAY (SELECT id FROM own))
RETURNING id, status

-- name: extend
-- Never earlier than it was.
{own}
UPDATE {schema}.jobs
   SET claimed_until = greatest(claimed_until, clock_timestamp() + make_interval(secs => $3::float8))
 WHERE id = ANY (ARRAY (SELECT id FROM own))
RETURNING id, status

-- name: recall
-- What has become of those that were not ours to change: with the same token on it, it was we who changed it before.
SELECT job.id, job.status
  FROM unnest($1::bigint[]) AS wanted (id),
       LATERAL (SELECT id, status FROM {schema}.jobs WHERE jobs.id = wanted.id AND claim_token = $2 OFFSET 0) AS job

-- name: reap
-- Expired leases, as a failed attempt each; who completes one just now is first. The token goes too: whoever comes with
-- it later has lost the job, whatever it wants.
WITH expired AS MATERIALIZED (
    SELECT id FROM {schema}.jobs
     WHERE status = 'running' AND claimed_until < now()
     ORDER BY id LIMIT $1::bigint FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {schema}.jobs
   SET status = CASE WHEN attempts >= max_attempts THEN 'failed' ELSE 'pending' END,
       finished_at = CASE WHEN attempts >= max_attempts THEN clock_timestamp() END,
       run_at = CASE WHEN attempts >= max_attempts THEN run_at
                     ELSE clock_timestamp() + make_interval(secs =>
                          least($3::float8, $2::float8 * 2.0 ^ least(greatest(attempts - 1, 0), 60))
                          * (1 - 0.25 * random())) END,
       claimed_until = NULL, claim_token = NULL, exit_code = NULL, reason = 'lease expired', last_error = NULL
 WHERE id = ANY (ARRAY (SELECT id FROM expired)) AND status = 'running' AND claimed_until < now()
RETURNING id, status

-- name: retry_ids
-- Those that failed, named: cancelled ones too. A dedupe key that is in use again keeps its job where it is, and of
-- several with one key the first comes back.
WITH own AS MATERIALIZED (
    SELECT job.id, job.queue, job.dedupe_key FROM unnest($1::bigint[]) AS wanted (id),
           LATERAL (SELECT id, queue, dedupe_key FROM {schema}.jobs
                     WHERE jobs.id = wanted.id AND status = 'failed' FOR NO KEY UPDATE) AS job
), first AS (
    SELECT min(id) AS id FROM own
     WHERE dedupe_key IS NULL OR NOT EXISTS (
           SELECT FROM {schema}.jobs AS other
            WHERE other.queue = own.queue AND other.dedupe_key = own.dedupe_key
              AND other.status IN ('pending', 'running'))
     GROUP BY queue, dedupe_key, CASE WHEN dedupe_key IS NULL THEN id END
), retried AS (
    UPDATE {schema}.jobs
       SET status = 'pending', attempts = 0, claim_token = NULL, run_at = NULL, finished_at = NULL,
           exit_code = NULL, reason = NULL, last_error = NULL
     WHERE id = ANY (ARRAY (SELECT id FROM first))
    RETURNING id
)
SELECT id, CASE WHEN id IN (SELECT id FROM retried) THEN 'retried' ELSE 'duplicate' END FROM own

-- name: failed_ids
-- Those that failed and were not cancelled, from an id on.
SELECT id FROM {schema}.jobs
 WHERE status = 'failed' AND queue = $1 AND id > $2::bigint AND reason IS DISTINCT FROM 'cancelled'
 ORDER BY id LIMIT $3::bigint

-- name: failed_queues
-- The queues that have some, one step of the index each.
WITH RECURSIVE names (queue) AS (
    (SELECT queue FROM {schema}.jobs WHERE status = 'failed' ORDER BY queue LIMIT 1)
     UNION ALL
    SELECT (SELECT queue FROM {schema}.jobs WHERE status = 'failed' AND jobs.queue > names.queue
             ORDER BY queue LIMIT 1)
      FROM names WHERE names.queue IS NOT NULL
)
SELECT queue FROM names WHERE queue IS NOT NULL

-- name: cancel
-- Who runs it learns it with the next extension of the lease: the token is gone.
WITH own AS MATERIALIZED (
    SELECT job.id FROM unnest($1::bigint[]) AS wanted (id),
           LATERAL (SELECT id FROM {schema}.jobs
                     WHERE jobs.id = wanted.id AND status IN ('pending', 'running') FOR NO KEY UPDATE) AS job
)
UPDATE {schema}.jobs
   SET status = 'failed', finished_at = clock_timestamp(), claimed_until = NULL, claim_token = NULL,
       reason = 'cancelled', exit_code = NULL
 WHERE id = ANY (ARRAY (SELECT id FROM own))
RETURNING id, 'cancelled'

-- name: open_ids
-- Those of a queue that can be cancelled.
(SELECT id FROM {schema}.jobs WHERE queue = $1 AND status = 'pending' AND run_at IS NULL LIMIT $2::bigint)
 UNION ALL
(SELECT id FROM {schema}.jobs WHERE queue = $1 AND status = 'pending' AND run_at IS NOT NULL LIMIT $2::bigint)
 UNION ALL
(SELECT id FROM {schema}.jobs WHERE queue = $1 AND status = 'running' LIMIT $2::bigint)
 LIMIT $2::bigint

-- name: states
-- What named jobs are.
SELECT id, status FROM {schema}.jobs WHERE id = ANY ($1::bigint[])

-- name: purge_done
-- One batch of those that were done long ago.
DELETE FROM {schema}.jobs WHERE id = ANY (ARRAY (
    SELECT id FROM {schema}.jobs
     WHERE status = 'done' AND finished_at < now() - make_interval(secs => $1::float8)
     ORDER BY finished_at, id LIMIT $2::bigint FOR UPDATE SKIP LOCKED))
RETURNING 1

-- name: purge_failed
-- The same of those that failed.
DELETE FROM {schema}.jobs WHERE id = ANY (ARRAY (
    SELECT id FROM {schema}.jobs
     WHERE status = 'failed' AND finished_at < now() - make_interval(secs => $1::float8)
     ORDER BY queue, id LIMIT $2::bigint FOR UPDATE SKIP LOCKED))
RETURNING 1

-- name: list
-- Jobs in one state, of one queue or of all.
SELECT id, queue, status, priority, attempts, max_attempts, to_json(created_at) #>> '{}', to_json(run_at) #>> '{}',
       to_json(claimed_until) #>> '{}', claimed_by, to_json(finished_at) #>> '{}', exit_code, reason, last_error,
       dedupe_key
  FROM {schema}.jobs
 WHERE status = $1 AND ($2::text IS NULL OR queue = $2)
 ORDER BY {order} LIMIT $3::bigint

-- name: show
-- One job, without its payload.
SELECT id, queue, status, priority, attempts, max_attempts, to_json(created_at) #>> '{}', to_json(run_at) #>> '{}',
       to_json(claimed_until) #>> '{}', claimed_by, to_json(finished_at) #>> '{}', exit_code, reason, last_error,
       dedupe_key
  FROM {schema}.jobs WHERE id = $1::bigint

-- name: show_payload
-- Its payload.
SELECT payload::text FROM {schema}.jobs WHERE id = $1::bigint

-- name: stats
-- What there is of each queue, by the indexes of what is not done; ages in seconds.
SELECT queue, sum(ready), sum(delayed), sum(running), sum(expired), sum(failed), max(oldest_s)
  FROM (SELECT queue, count(*) AS ready, 0 AS delayed, 0 AS running, 0 AS expired, 0 AS failed,
               extract(epoch FROM now() - min(created_at)) AS oldest_s
          FROM {schema}.jobs WHERE status = 'pending' AND run_at IS NULL GROUP BY queue
         UNION ALL
        SELECT queue, count(*) FILTER (WHERE run_at <= now()), count(*) FILTER (WHERE run_at > now()), 0, 0, 0,
               extract(epoch FROM now() - min(run_at) FILTER (WHERE run_at <= now()))
          FROM {schema}.jobs WHERE status = 'pending' AND run_at IS NOT NULL GROUP BY queue
         UNION ALL
        SELECT queue, 0, 0, count(*) FILTER (WHERE claimed_until >= now()),
               count(*) FILTER (WHERE claimed_until < now()), 0, NULL
          FROM {schema}.jobs WHERE status = 'running' GROUP BY queue
         UNION ALL
        SELECT queue, 0, 0, 0, 0, count(*), NULL
          FROM {schema}.jobs WHERE status = 'failed' GROUP BY queue) AS parts
 GROUP BY queue ORDER BY queue

-- name: known_queues
-- Queues that the statistics know: one whose jobs are all done is in no other index.
SELECT unnest(most_common_vals::text::text[]) FROM pg_catalog.pg_stats
 WHERE schemaname = $1 AND tablename = 'jobs' AND attname = 'queue'

-- name: index_size
-- How large an index is (bytes).
SELECT pg_relation_size($1::regclass)

-- name: count_done
-- Exactly, while there are few.
SELECT queue, count(*) FROM {schema}.jobs WHERE status = 'done' GROUP BY queue

-- name: estimate_done
-- As the planner reckons.
EXPLAIN (FORMAT JSON) SELECT FROM {schema}.jobs WHERE status = 'done' AND queue = $1

-- name: diagnose
-- What slows a queue down, as far as this role may see it: autovacuum, dead rows, indexes, and the oldest snapshot that
-- keeps dead rows from being removed.
SELECT current_setting('autovacuum') = 'on'
         AND NOT coalesce(reloptions && ARRAY['autovacuum_enabled=false', 'autovacuum_enabled=off'], false),
       pg_stat_get_dead_tuples(pg_class.oid),
       (SELECT string_agg(indexrelid::regclass::text, ', ') FROM pg_index WHERE indrelid = pg_class.oid AND NOT indisvalid),
       extract(epoch FROM clock_timestamp() - snapshots.since), snapshots.who, snapshots.statement
  FROM pg_class
  LEFT JOIN (
       SELECT xact_start AS since, format('backend %s of %s, "%s"', pid, usename, application_name) AS who,
              format('SELECT pg_terminate_backend(%s)', pid) AS statement
         FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()
          AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
        UNION ALL
       SELECT prepared, format('prepared transaction "%s" of %s', gid, owner), format('ROLLBACK PREPARED %L', gid)
         FROM pg_prepared_xacts WHERE database = current_database()
        ORDER BY 1 LIMIT 1) AS snapshots ON true
 WHERE pg_class.oid = $1::regclass

-- name: stuck_leases
-- Running jobs that nobody has taken back for so long (seconds).
SELECT count(*) FROM {schema}.jobs
 WHERE status = 'running' AND claimed_until < now() - make_interval(secs => $1::float8)
