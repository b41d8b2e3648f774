-- What only looks and takes no lock. A transaction pooler may sit in between: whatever is set is set for the one
-- transaction.

-- name: begin_look
-- One view of the server, whatever the role's defaults are.
BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY

-- name: prepare_look
-- Names mean what they should, and a look ends by itself on the server too.
SELECT set_config('search_path', 'pg_catalog', true), set_config('statement_timeout', $1::text, true)

-- name: end_look
-- Nothing was written.
COMMIT

-- name: locks
-- The advisory locks of this database, or only these keys: who holds them and who waits, but ourselves, oldest first.
-- PostgreSQL does not say when a lock was taken; a session has not taken one since its last statement ended. What a
-- role may not see is NULL. A prepared transaction has no pid.
SELECT classid, objid, objsubid, mode, granted, pid,
       usename,
       application_name,
       CASE WHEN query LIKE '/* batchguard {%' THEN query END,
       to_json(since) #>> '{}',
       extract(epoch FROM statement_timestamp() - since),
       coalesce(client_hostname, host(client_addr)),
       query = '<insufficient privilege>',
       extract(epoch FROM statement_timestamp() - state_change),
       to_json(backend_start) #>> '{}'
  FROM pg_locks
  LEFT JOIN pg_stat_activity USING (pid)
 CROSS JOIN LATERAL (SELECT CASE WHEN NOT granted THEN coalesce(waitstart, query_start)
                                 WHEN state = 'active' THEN query_start
                                 ELSE state_change END AS since) AS guess
 WHERE locktype = 'advisory'
   AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND pid IS DISTINCT FROM pg_backend_pid()
   AND ($1::oid[] IS NULL
        OR (classid, objid, objsubid) IN (SELECT * FROM unnest($1::oid[], $2::oid[], $3::int2[])))
 ORDER BY since, pid

-- name: hash_name
-- The key that `--key-from-name` stands for.
SELECT hashtextextended($1::text, 0)

-- name: still_held
-- Does that very session hold all of these locks? A role that may not see when it began gets NULL for an answer.
SELECT pg_is_in_recovery(),
       (SELECT system_identifier FROM pg_control_system()),
       EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1::int),
       (SELECT backend_start = $2::timestamptz FROM pg_stat_activity WHERE pid = $1::int),
       (SELECT count(DISTINCT (classid, objid, objsubid))
          FROM pg_locks
          JOIN unnest($3::oid[], $4::oid[], $5::int2[]) AS key (classid, objid, objsubid)
         USING (classid, objid, objsubid)
         WHERE locktype = 'advisory' AND granted AND pid = $1::int
           AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))

-- name: ending_rights
-- May we end this session? Its own role may, a member of pg_signal_backend may unless it is a superuser's.
SELECT current_user,
       quote_ident(current_user),
       pg_has_role(usesysid, 'USAGE'),
       pg_has_role('pg_signal_backend', 'USAGE'),
       pg_has_role('pg_read_all_stats', 'USAGE'),
       coalesce((SELECT rolsuper FROM pg_roles WHERE pg_roles.oid = usesysid), false)
  FROM pg_stat_activity
 WHERE pid = $1::int

-- name: end_session
-- End a session, but only if it is still the one that was looked at and still holds the lock.
SELECT pg_terminate_backend(pid)
  FROM pg_stat_activity
 WHERE pid = $1::int
   AND backend_start = $2::timestamptz
   AND EXISTS (SELECT FROM pg_locks
                WHERE locktype = 'advisory' AND granted AND pg_locks.pid = $1::int
                  AND (classid, objid, objsubid) = ($3::oid, $4::oid, $5::int2))

-- name: diagnose
-- What the server says of itself, of us and of our role, before anything is set.
SELECT current_user,
       quote_ident(current_user),
       (SELECT system_identifier FROM pg_control_system()),
       current_setting('server_version'),
       NOT pg_is_in_recovery(),
       pg_backend_pid(),
       (SELECT json_agg(f ORDER BY place) FROM unnest($1::text[]) WITH ORDINALITY AS functions (f, place)
         WHERE NOT has_function_privilege(f, 'EXECUTE')),
       pg_has_role('pg_monitor', 'USAGE'),
       pg_has_role('pg_signal_backend', 'USAGE'),
       inet_server_addr() IS NULL,
       extract(epoch FROM clock_timestamp()),
       current_setting('synchronous_standby_names'),
       (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))

-- name: defaults
-- What the session was given without asking, and by whom.
SELECT name, pg_catalog.current_setting(name), source
  FROM pg_catalog.pg_settings
 WHERE name OPERATOR(pg_catalog.=) ANY ($1::text[])
 ORDER BY name

-- name: keepalive
-- What the platform made of the keepalive settings; 0 where it does not know them.
SELECT current_setting('tcp_user_timeout'),
       (SELECT setting::float FROM pg_settings WHERE name = 'tcp_keepalives_idle')
         + (SELECT setting::float FROM pg_settings WHERE name = 'tcp_keepalives_interval')
         * (SELECT setting::float FROM pg_settings WHERE name = 'tcp_keepalives_count')
