#!/bin/sh
# A batch in steps. batchguard kills it when the lock is lost; between two steps it makes sure for itself, for the case
# that batchguard is stopped and cannot:
#
#   batchguard run --key 100:1 -- /opt/batch/steps.sh
#
# Any answer but 0 ends it, here by `set -e`: what cannot be told is no yes.
set -eu

step() {
    echo "$1"
    sleep "${STEP_SECONDS:-1}"
}

step "extract"
batchguard still-held
step "load"
batchguard still-held
step "send mail"
