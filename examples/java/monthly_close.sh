#!/bin/bash
# The same for the program that asks by SQL, on the connection that it has anyway.
set -euo pipefail
cd "$(dirname "$0")"

exec batchguard run --key 100:2 -- java -cp "${JDBC_JAR:-/usr/share/java/postgresql.jar}" MonthlyClose.java "${@:-3}"
