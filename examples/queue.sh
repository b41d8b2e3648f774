#!/bin/sh
# A tour of the queue from a shell: everything a job can go through. It needs psql, and a role that may create roles.
#
#   BATCHGUARD_DSN='host=db01 dbname=test user=postgres' queue.sh
set -eu
export BATCHGUARD_CONFIG="${TMPDIR:-/tmp}/queue_tour.$$.toml"
claimed="${TMPDIR:-/tmp}/queue_tour.$$.jsonl"
cat >"$BATCHGUARD_CONFIG" <<'TOML'
[jobs]
schema = "queue_tour"
queue = "mail"
backoff = "30s"
TOML
sql() { psql -qXAt -v ON_ERROR_STOP=1 "$BATCHGUARD_DSN" "$@"; }
clean() {
    sql -c 'SET client_min_messages = warning' -c 'DROP SCHEMA IF EXISTS queue_tour CASCADE' \
        -c 'DROP ROLE IF EXISTS queue_tour_app'
    rm -f "$BATCHGUARD_CONFIG" "$claimed"
}
trap clean EXIT
field() { sed -n "s/.*\"$1\": \"\{0,1\}\([^\",}]*\).*/\1/p"; }

echo "== a queue, and an application that may put jobs in and nothing else"
batchguard jobs migrate
sql <<'SQL'
CREATE ROLE queue_tour_app;
GRANT USAGE ON SCHEMA queue_tour TO queue_tour_app;
GRANT INSERT (payload, queue, priority, run_at, max_attempts, dedupe_key) ON queue_tour.jobs TO queue_tour_app;
SQL

echo "== jobs come in: one, a hundred thousand, and one in the application's own transaction"
batchguard jobs enqueue '{"to": "first@example.org"}' --priority -10
seq 100000 | sed 's/.*/{"to": "user&@example.org", "n": &}/' | batchguard jobs enqueue --lines
sql <<'SQL'
BEGIN;
SET LOCAL ROLE queue_tour_app;
INSERT INTO queue_tour.jobs (payload, queue, priority) VALUES ('{"to": "app@example.org"}', 'mail', -9);
COMMIT;
SQL

echo "== ten are claimed, and done"
batchguard jobs claim -n 10 --lease 5m >"$claimed"
head -n 2 "$claimed"
batchguard jobs complete --stdin <"$claimed" | tail -n 1

echo "== one fails, and comes back after a pause"
batchguard jobs claim >"$claimed"
batchguard jobs fail "$(field id <"$claimed")" "$(field claim_token <"$claimed")" --error 'mailbox full' --exit-code 75
batchguard jobs show "$(field id <"$claimed")"

echo "== one takes too long: its lease expires, and it is taken back"
batchguard jobs claim --lease 0.1s >"$claimed"
sleep 0.3
batchguard jobs reap
batchguard jobs complete --stdin <"$claimed" || echo "too late: exit $?"

echo "== one has failed for good, and is retried by hand"
batchguard jobs claim | sed 's/^{/{"retry": false, "error": "no such user", /' | batchguard jobs fail --stdin
batchguard jobs stats
batchguard jobs retry --all-queues

echo "== the rest is cancelled, and all of it purged"
batchguard jobs cancel --queue mail
batchguard jobs purge --older-than 0s --failed
batchguard jobs stats --queue mail
