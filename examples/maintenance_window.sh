#!/bin/sh
# A maintenance window: a batch that runs now ends in peace, and none starts until the work is done.
#
#   maintenance_window.sh KEY UNTIL COMMAND [ARG]...
#   maintenance_window.sh daily_sales 06:00 psql -d batch -f migration.sql
#
# At UNTIL the window is closed whether the work is done or not: batches that never run are worse than late work.
set -eu
key=$1 until=$2
shift 2

# Comes back once the key is held; exits 75 when a run has it for longer than half an hour.
hold=$(batchguard hold --key "$key" --wait 30m --until "$until" --reason "maintenance: $1" --detach)
trap 'kill "$hold" 2>/dev/null || echo "the window was closed before the work was done" >&2' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

batchguard status --key "$key"
"$@"
