-- The statements of a lock session. Parameters are text in, text out; {try_lock} and its like are
-- replaced by a function name, since a function cannot be a parameter.

-- name: prepare_session
-- Whatever the role's or the database's defaults are, this session is never ended for being idle or
-- slow, writes durably, tells of warnings, and is given up by the server after ttl seconds of silence.
SELECT pg_catalog.set_config(name, value, false) IS NULL
  FROM (VALUES
    ('search_path', 'pg_catalog'),
    ('client_min_messages', 'warning'),
    ('statement_timeout', '0'),
    ('lock_timeout', '0'),
    ('idle_session_timeout', '0'),
    ('idle_in_transaction_session_timeout', '0'),
    ('transaction_timeout', '0'),
    ('default_transaction_isolation', 'read committed'),
    ('default_transaction_read_only', 'off'),
    ('default_transaction_deferrable', 'off'),
    ('synchronous_commit',
      CASE pg_catalog.current_setting('synchronous_commit') WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END),
    ('tcp_keepalives_idle', $1::text),
    ('tcp_keepalives_interval', $2::text),
    ('tcp_keepalives_count', $3::text),
    ('tcp_user_timeout', $4::text)
  ) AS setting (name, value)
 WHERE name <> 'transaction_timeout'
    OR pg_catalog.current_setting('server_version_num')::int >= 170000

-- name: identify
-- Who we are talking to, and whether it may serve.
SELECT pg_backend_pid(),
       current_database(),
       (SELECT oid FROM pg_database WHERE datname = current_database()),
       (SELECT system_identifier FROM pg_control_system()),
       (SELECT to_json(backend_start) #>> '{}' FROM pg_stat_get_activity(pg_backend_pid())),
       current_user,
       quote_ident(current_user),
       pg_is_in_recovery(),
       (SELECT f FROM unnest($1::text[]) WITH ORDINALITY AS functions (f, place)
         WHERE NOT has_function_privilege(f, 'EXECUTE') ORDER BY place LIMIT 1),
       CASE WHEN $2::text IS NOT NULL THEN hashtextextended($2::text, 0) END,
       current_setting('tcp_user_timeout')

-- name: server_age
-- What happened that freed all locks, and how many seconds ago by the server's clock. The walwriter
-- is started when a server begins to take writes, but only pg_monitor sees when. A cluster on
-- timeline 1 was never promoted. A checkpoint is dated in whole seconds, rounded down.
SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()),
       extract(epoch FROM pg_postmaster_start_time()) - (system_identifier >> 32),
       (SELECT extract(epoch FROM clock_timestamp() - stats_reset) FROM pg_stat_bgwriter),
       CASE WHEN pg_last_wal_replay_lsn() IS NULL OR wal_timeline = 1 THEN NULL
            WHEN wal_timeline <> timeline_id OR redo_lsn < pg_last_wal_replay_lsn() THEN 0
            ELSE extract(epoch FROM clock_timestamp() - checkpoint_time) - 1 END,
       (SELECT extract(epoch FROM clock_timestamp() - max(backend_start))
          FROM pg_stat_activity WHERE backend_type = 'walwriter')
  FROM pg_control_system(),
       pg_control_checkpoint(),
       (SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int) AS wal (wal_timeline)

-- name: incarnation
-- What differs after a restart, a crash or a promotion, and is the same as long as a server only serves.
SELECT to_json(pg_catalog.pg_postmaster_start_time()) #>> '{}',
       (SELECT to_json(stats_reset) #>> '{}' FROM pg_catalog.pg_stat_bgwriter),
       pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8),
       (SELECT system_identifier FROM pg_catalog.pg_control_system())

-- name: try_lock
-- Take a lock if it is free. `mine` looks first: a backend that holds it before we ask was somebody
-- else's a moment ago, so a pooler sits in between; and a second call would stack.
WITH before AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM pg_locks
                    WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted AND database = $1::oid
                      AND (classid, objid, objsubid) = ($2::oid, $3::oid, $4::int2)) AS mine,
           pg_backend_pid() AS pid)
SELECT mine, pid, CASE WHEN NOT mine THEN pg_catalog.{try_lock} END FROM before

-- name: busy_locks
-- Which of these locks somebody else holds in a way that excludes us; shared holders exclude only an exclusive one.
SELECT classid, objid, objsubid
  FROM pg_locks
  JOIN unnest($2::oid[], $3::oid[], $4::int2[]) AS key (classid, objid, objsubid)
 USING (classid, objid, objsubid)
 WHERE locktype = 'advisory' AND database = $1::oid AND granted AND pid <> pg_backend_pid()
   AND ($5::text = 'ExclusiveLock' OR mode = 'ExclusiveLock')

-- name: listen
-- Hear of runs that take a lock and give it back, so that a lock which came free otherwise is known for it.
LISTEN batchguard

-- name: unlisten
-- A run of hours must not collect what others announce.
UNLISTEN *

-- name: announce
-- Tell whoever may be waiting that these locks are taken, before anything is started under them, or,
-- before they are free, that they are given back by a run that is over. Without another run in this
-- database there is nobody to tell, and no commit to pay for.
SELECT pg_notify('batchguard', $1::text)
 WHERE EXISTS (SELECT FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()
                  AND application_name LIKE 'batchguard run %')

-- name: limit_waiting
-- Bound the next wait for a lock; a longer one would keep a snapshot that CREATE INDEX CONCURRENTLY waits for.
SELECT set_config('lock_timeout', $1::text, false)

-- name: wait_lock
-- Queue for a lock, in the order of arrival.
SELECT pg_catalog.{lock}

-- name: unlock
-- Give a lock back; false when it was not held.
SELECT pg_catalog.{unlock}

-- name: check_locks
-- Does this backend hold every one of these locks in this mode, and is the server still a primary?
-- Everything is qualified: what DISCARD ALL takes away besides the lock is our search_path.
SELECT (SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks
          JOIN ROWS FROM (pg_catalog.unnest($2::pg_catalog.oid[]), pg_catalog.unnest($3::pg_catalog.oid[]),
                          pg_catalog.unnest($4::pg_catalog.int2[])) AS key (classid, objid, objsubid)
         USING (classid, objid, objsubid)
         WHERE locktype OPERATOR(pg_catalog.=) 'advisory' AND database OPERATOR(pg_catalog.=) $1::pg_catalog.oid
           AND pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()
           AND granted AND mode OPERATOR(pg_catalog.=) $5::pg_catalog.text)
       OPERATOR(pg_catalog.=) pg_catalog.cardinality($2::pg_catalog.oid[]),
       NOT pg_catalog.pg_is_in_recovery()

-- name: begin_token
-- In a transaction of its own, so that a warning of the commit is told from any other.
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE

-- name: take_token
-- A number that grows with every acquisition, durable before the command starts: a transaction id,
-- in a transaction that also writes WAL, so that its commit is flushed (and replicated, if so set).
SELECT pg_current_xact_id(), pg_logical_emit_message(true, 'batchguard', '')

-- name: commit_token
-- A commit that did not wait for its synchronous standby, since somebody cancelled the wait, is only a warning.
COMMIT

-- name: rivals
-- Which runs, or their shields, hold these locks in a way that excludes us.
SELECT pid
  FROM pg_locks
  JOIN unnest($2::oid[], $3::oid[], $4::int2[]) AS key (classid, objid, objsubid)
 USING (classid, objid, objsubid)
  JOIN pg_stat_activity USING (pid)
 WHERE locktype = 'advisory' AND database = $1::oid AND granted AND pid <> pg_backend_pid()
   AND ($5::text = 'ExclusiveLock' OR mode = 'ExclusiveLock')
   AND (application_name LIKE 'batchguard run %' OR application_name LIKE 'batchguard shield %')
