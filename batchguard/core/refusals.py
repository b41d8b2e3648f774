"""Every line that says why a server, a role or this host does not serve; they are part of the interface.

Each says what happened, to what, and what to do; `Purpose` says what was not done for it.
"""

import shlex
from dataclasses import dataclass
from errno import EAGAIN, EMFILE, ENFILE, ENOMEM

from batchguard.core.durations import format_duration
from batchguard.core.messages import Subject


@dataclass(frozen=True)
class Purpose:
    """What a command came for, in the words of its refusals: `cannot guard K: … Not started, exit 78.`."""

    verb: str
    undone: str
    closing: str
    goes_on: bool = False

    def outcome(self, key: str, code: int) -> str:
        """Complete `cannot reach db01 (…)` with what was not done to which key, and what follows."""
        return (f": {key} {self.undone}" if self.undone else "") + f", {self.then(code)}."

    def then(self, code: int) -> str:
        """Say what follows: the end, or another try."""
        return "trying again" if self.goes_on else f"exit {code}"

    def end(self, code: int) -> str:
        """Give the last words of a refusal."""
        return f"{self.closing}, {self.then(code)}." if self.closing else f"Exit {code}."


RUN = Purpose("guard", "was not run", "Not started")
HOLD = Purpose("hold", "is not on hold", "Not on hold")
FREE = Purpose("free", "was not freed", "Nobody was ended")
LOOK = Purpose("look at", "", "")
JOBS = Purpose("use", "", "")
RETAKE = Purpose("hold", "is not on hold now", "Not on hold now", goes_on=True)


def pooler(purpose: Purpose, subject: Subject) -> str:
    """Refuse a pooler that shares sessions."""
    both = "two runs could both hold the lock" if purpose is RUN else "the lock could be somebody else's as well"
    return (
        f"cannot {purpose.verb} {subject.key}: {subject.database} is reached through a pooler that shares sessions, so "
        f"{both}. Connect directly; if it pools whole sessions, say so with --allow-pooler. {purpose.end(78)}"
    )


def standby(purpose: Purpose, subject: Subject) -> str:
    """Refuse a server that is not a primary."""
    why = "takes no jobs" if purpose is JOBS else "its locks exclude nobody"
    return (
        f"cannot {purpose.verb} {subject.key}: {subject.host} is a standby and {why}. "
        f"List all hosts in the dsn, or name the primary. {purpose.end(78)}"
    )


def no_execute_right(purpose: Purpose, role: str, quoted_role: str, database: str, function: str) -> str:
    """Say which right on which function is missing, and what a DBA must run."""
    return (
        f'role "{role}" may not execute {function} in {database}. '
        f"Ask a DBA: GRANT EXECUTE ON FUNCTION {function} TO {quoted_role}; {purpose.end(77)}"
    )


def no_right(purpose: Purpose, subject: Subject, why: str) -> str:
    """Say which right is missing, in the server's words."""
    return f"cannot {purpose.verb} {subject.place}: {why} (42501). Ask a DBA to grant it. {purpose.end(77)}"


def unreachable(purpose: Purpose, key: str, host: str, why: str, *, named: bool = True) -> str:
    """Say that the database cannot be reached; `named` is False when nobody said which database it is."""
    advice = "To keep trying: --connect-retry 5m. Trying it out? --local" if purpose is RUN else ""
    if not named:
        advice = "No database was named: --dsn, BATCHGUARD_DSN, or dsn in /etc/batchguard.toml. Trying it out? --local"
    return f"cannot reach {host} ({why}){purpose.outcome(key, 69)} {advice}".rstrip()


def no_slot(purpose: Purpose, key: str, host: str, waited_s: float) -> str:
    """Say that the server has no connection left."""
    return (
        f"no connection slot free on {host} for {format_duration(waited_s)} (53300)"
        f"{purpose.outcome(key, 69)} "
        "Raise max_connections, or see who uses them: SELECT usename, count(*) FROM pg_stat_activity GROUP BY 1"
    )


def lock_table_full(purpose: Purpose, subject: Subject) -> str:
    """Say that the server's lock table has no room, which keeps out those who look as well."""
    see = "batchguard status"
    if purpose is LOOK:
        see = "in a session that is open already: SELECT pid, count(*) FROM pg_locks GROUP BY 1 ORDER BY 2 DESC"
    return (
        f"no room in the lock table of {subject.database} (53200){purpose.outcome(subject.key, 69)} "
        f"Raise max_locks_per_transaction, or see who holds so many: {see}"
    )


def login_refused(purpose: Purpose, key: str, host: str, why: str) -> str:
    """Say that the server refused the login."""
    return (
        f"{host} refused the login ({why}){purpose.outcome(key, 77)} Check user and password: "
        "~/.pgpass, the service file, or PGUSER and PGPASSWORD."
    )


def no_such_database(purpose: Purpose, key: str, host: str, why: str) -> str:
    """Say that the server has no such database, in the server's words."""
    return f"{why} on {host}{purpose.outcome(key, 78)} Correct dbname in the dsn."


def server_too_old(purpose: Purpose, key: str, host: str, version: int) -> str:
    """Refuse a server older than PostgreSQL 14."""
    return (
        f"cannot {purpose.verb} {key}: {host} runs PostgreSQL {version // 10000}, and 14 is the oldest that tells "
        f"whether it is a primary when a session begins. {purpose.end(78)}"
    )


def short_ttl(purpose: Purpose, subject: Subject, server_ttl_s: float, window_s: float) -> str:
    """Refuse a server whose platform gives a silent session up too early."""
    return (
        f"unsafe timing: {subject.host} gives a silent session up after {format_duration(server_ttl_s)}, before a tree "
        f"is surely dead ({format_duration(window_s)}): lower --check-timeout or --kill-after. {purpose.end(78)}"
    )


def no_queue(schema: str, database: str) -> str:
    """Say that nobody has made the queue's table yet."""
    return (
        f'there is no queue in schema "{schema}" of {database}. Is that the right name? To make one there, with the '
        f"same --dsn, --config or --local: batchguard jobs migrate --schema {shlex.quote(schema)}. Exit 78."
    )


def schema_older(schema: str, database: str, version: int, wanted: int) -> str:
    """Say that the queue's table is that of an older batchguard."""
    return (
        f'the queue in schema "{schema}" of {database} has version {version}, and this batchguard needs {wanted}. '
        "Bring it up to date: batchguard jobs migrate. Exit 78."
    )


def schema_newer(schema: str, database: str, version: int, wanted: int) -> str:
    """Say that the queue's table is that of a newer batchguard, which we would damage."""
    return (
        f'the queue in schema "{schema}" of {database} has version {version}, and this batchguard knows {wanted} at '
        "most: it is older than the one that made the queue. Install the newer one on this host. Exit 78."
    )


def strange_table(schema: str, database: str) -> str:
    """Say that a table of the queue's name is there that is not ours."""
    return (
        f'schema "{schema}" of {database} has a table "jobs" that batchguard did not make. Choose another schema: '
        "--schema, or schema in [jobs]. Exit 78."
    )


def no_right_to_jobs(why: str, database: str, role: str) -> str:
    """Say which right is missing, in the server's words."""
    return (
        f'role "{role}" may not do this with the queue in {database}: {why} (42501). Ask its owner; '
        "batchguard jobs migrate --help lists the rights. Exit 77."
    )


def queue_locked(database: str, waited_s: float) -> str:
    """Say that another transaction keeps locked what is needed: a job, a dedupe key, or all of the table."""
    return (
        f"another transaction keeps a job, a dedupe key or the whole table of the queue in {database} locked, for "
        f"{format_duration(waited_s)} already (55P03), exit 69. Who: SELECT pid, usename, xact_start, query FROM "
        "pg_stat_activity WHERE datname = current_database() ORDER BY xact_start"
    )


def not_taken(sqlstate: str, why: str) -> str:
    """Say that the server does not take a value, in its words."""
    return f"the server does not take it ({sqlstate}: {why})"


def statement_refused(host: str, sqlstate: str, why: str) -> str:
    """Say what the server would not do, in its words."""
    return f"{host} refused ({sqlstate}: {why}), exit 69."


def not_inserted(database: str) -> str:
    """Say that a rule of somebody's keeps a job out, without an error."""
    return (
        f"the job was not taken in {database}, although no dedupe key is in use: does a trigger or a unique index of "
        "your own on the queue's table keep it out? Exit 78."
    )


def enqueue_ended(database: str, why: str) -> str:
    """Say that a session ended before it came to the commit."""
    return f"{database} ended the session ({why}) before the jobs were committed, exit 69"


def enqueue_unsure(database: str, why: str) -> str:
    """Say that nobody knows whether jobs came in."""
    return (
        f"the connection broke ({why}) when the jobs were being committed in {database}: they are enqueued, or they "
        "are not, exit 69. See: batchguard jobs stats. With dedupe keys a second try would be harmless"
    )


def token_unconfirmed(subject: Subject, why: str) -> str:
    """Say that the fencing token could not be made durable."""
    return (
        f"cannot guard {subject.place}: the fencing token was not made durable ({why}); is a synchronous standby "
        f"missing? {RUN.end(69)}"
    )


def no_proc() -> str:
    """Refuse a system on which a process tree cannot be followed, and so not be killed."""
    return (
        "cannot guard: /proc does not show the children of a process, so a batch could not be killed as a whole. "
        f"Mount /proc (a kernel with CONFIG_PROC_CHILDREN is needed). {RUN.end(78)}"
    )


def system_limit(key: str, number: int | None, why: str | None) -> str:
    """Say that this host has no process, descriptor or memory left for a run; `number` is an errno."""
    advice = {
        EMFILE: "Raise the limit of open files: ulimit -n, or LimitNOFILE= of the unit.",
        ENFILE: "The whole system is out of open files: see fs.file-max.",
        EAGAIN: "Raise the limit of processes: ulimit -u, or pids.max of the control group (TasksMax= of the unit).",
        ENOMEM: "Free memory, or raise the limit of the control group.",
    }
    return f"cannot guard {key}: {why}. {advice.get(number or 0, 'Look at this host.')} {RUN.end(69)}"
