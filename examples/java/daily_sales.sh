#!/bin/bash
# Started by cron; gives its exit code to cron. The lock is taken once, here: the Java program must not take it itself.
set -euo pipefail
cd "$(dirname "$0")"

exec batchguard run --key 100:1 -- java DailySales.java "${@:-3}"
