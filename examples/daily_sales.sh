#!/bin/sh
# A batch that `crontab` starts under batchguard. It needs to know nothing about locks.
set -eu

echo "daily sales: run ${BATCHGUARD_RUN_ID:-by hand}, token ${BATCHGUARD_TOKEN:-none}"

# Whatever takes long: a program, a Java batch, psql. All of it is ended if the lock is lost.
sleep "${DAILY_SALES_SECONDS:-1}"

echo "daily sales: done"
