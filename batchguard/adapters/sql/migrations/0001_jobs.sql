-- The queue. A plain INSERT of a payload is the whole way in, so everything else has a default; what may be granted to
-- those who enqueue is INSERT on (payload, queue, priority, run_at, max_attempts, dedupe_key), and SELECT on (id).

CREATE TABLE IF NOT EXISTS {schema}.jobs (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    payload       jsonb NOT NULL,
    status        text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'running', 'done', 'failed')),
    created_at    timestamptz NOT NULL DEFAULT now(),
    claim_token   text,
    claimed_until timestamptz,
    attempts      integer NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    queue         text NOT NULL DEFAULT 'default' CHECK (octet_length(queue) BETWEEN 1 AND 63 AND queue !~ '[\x01-\x1f\x7f]'),
    priority      smallint NOT NULL DEFAULT 0,
    run_at        timestamptz CHECK (isfinite(run_at)),
    max_attempts  integer NOT NULL DEFAULT 5 CHECK (max_attempts >= 1),
    dedupe_key    text CHECK (octet_length(dedupe_key) BETWEEN 1 AND 512),
    claimed_by    text,
    exit_code     integer,
    reason        text CHECK (reason IN ('exit', 'signal', 'limit', 'lease expired', 'cancelled', 'no retry', 'payload')),
    last_error    text,
    finished_at   timestamptz,
    CONSTRAINT running_has_a_token CHECK (status <> 'running' OR claim_token IS NOT NULL),
    CONSTRAINT running_has_a_lease CHECK ((status = 'running') = (claimed_until IS NOT NULL)),
    CONSTRAINT finished_has_a_time CHECK ((status IN ('done', 'failed')) = (finished_at IS NOT NULL))
) WITH (
    -- A share of the table would let dead rows pile up with the done ones: a million of them at a hundred million.
    fillfactor = 85,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 20000
);

-- Ready at once, and waiting for a time: in one index, many that wait would stand before those that are ready.
CREATE INDEX IF NOT EXISTS jobs_ready ON {schema}.jobs (queue, priority, created_at, id)
    WHERE status = 'pending' AND run_at IS NULL;
CREATE INDEX IF NOT EXISTS jobs_waiting ON {schema}.jobs (queue, run_at, id)
    WHERE status = 'pending' AND run_at IS NOT NULL;
-- Without claimed_until, so that an extension of a lease changes no index.
CREATE INDEX IF NOT EXISTS jobs_running ON {schema}.jobs (id) WHERE status = 'running';
CREATE INDEX IF NOT EXISTS jobs_done ON {schema}.jobs (finished_at, id) WHERE status = 'done';
CREATE INDEX IF NOT EXISTS jobs_failed ON {schema}.jobs (queue, id) WHERE status = 'failed';
CREATE UNIQUE INDEX IF NOT EXISTS jobs_dedupe ON {schema}.jobs (queue, dedupe_key)
    WHERE dedupe_key IS NOT NULL AND status IN ('pending', 'running');
