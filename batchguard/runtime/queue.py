"""The queue as workers see it: claim, complete, fail, release, extend, reap, over a session that may come and go."""

import random
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TypeVar

from batchguard.adapters.clock import now
from batchguard.adapters.job_store import (
    SCHEMA_VERSION,
    quote_identifier,
    read_claimed,
    read_version,
    statements_in,
)
from batchguard.adapters.postgres import (
    Conversation,
    Row,
    SessionEndedError,
    StatementError,
    drive,
    execute,
    execute_together,
    load_queries,
)
from batchguard.core import refusals
from batchguard.core.errors import BatchguardError, ConfigError, RightsError, UnreachableError, UsageError
from batchguard.core.job import Claim, ClaimedJob, Ending, Result, Verb, group_claims, results_of
from batchguard.core.job_settings import JobSettings
from batchguard.core.payload import QUOTES
from batchguard.runtime.access import pause
from batchguard.runtime.connection import Connection, sleep

T = TypeVar("T")

LOCK_TIMEOUT = 10.0
"""Seconds that a statement waits for somebody who has locked the whole table."""

STATEMENT_TIMEOUT = 60.0
"""Seconds that a statement may take on the server; ours are short, and one that is not must not pile up."""

RECONNECT = 15.0
"""Seconds for which a session that ended is replaced: a server needs about as long to be started again."""

AGAIN = ("40001", "40P01")
"""Serialization failure and deadlock: the server asks for the statement to be repeated."""
TRIES = 10
"""How often a statement is repeated that met another one."""

NOT_PRINTABLE = ("54000", "53200", "57014", "22021", "22P05")
"""What a claim ends with for the sake of one payload: too large as text (program limit exceeded, out of memory, the
statement's time is over), or letters that are none in UTF-8."""

UNTRANSLATABLE = "22P05"
"""A letter that the database's encoding does not have."""

CHUNK = 1000
"""Jobs of one statement."""
REAP_LIMIT = 100
"""Expired leases that a claim takes care of beforehand."""


class Queue(Connection):
    """One session with the queue of one schema; a transaction pooler may sit in between."""

    def __init__(self, dsn: str, settings: JobSettings, command: str, *, check_version: bool = True) -> None:
        """Prepare; the connection is opened by the first statement.

        Args:
            dsn: the database's conninfo or URI.
            settings: of the queue.
            command: what the session calls itself.
            check_version: whether the schema must be the one that this program knows.

        Raises:
            ConfigError: the DSN does not read.
        """
        super().__init__(refusals.JOBS, dsn, "the queue", f"batchguard jobs {command}")
        self.jobs = settings
        self.check_version = check_version
        self.statements = statements_in(load_queries("jobs"), settings.schema)
        self.quoted_schema = quote_identifier(settings.schema)
        self.give_up_at = inf
        """When (CLOCK_BOOTTIME) nobody waits for an answer any more."""
        self.is_own = True
        """Whether the session is ours alone, so that what is set stays set for us and for nobody else."""

    @property
    def patience(self) -> float:
        """How long one answer may take (seconds): the server gives up first."""
        return STATEMENT_TIMEOUT + self.settings.check_timeout

    def persist(self, make: Callable[[], Conversation[T]]) -> T:
        """Carry on a conversation to its end; after a session that ended, another one, on a new session.

        Args:
            make: begins the conversation; it may have been carried out before, up to any point.

        Raises:
            BatchguardError: a line for the user.
        """
        deadline = last_end = -inf
        while True:
            try:
                return drive(self.explained(make()), sleep)
            except SessionEndedError as error:
                self.close()
                if now() - last_end > RECONNECT:  # the first one, or there was progress meanwhile
                    deadline = now() + RECONNECT
                elif now() >= deadline:
                    raise self.explain_end(error) from None
                last_end = now()
                self.retry_until = min(deadline, self.give_up_at)
            except BaseException:
                self.close()
                raise

    def explain(self, error: StatementError) -> BatchguardError:
        """Turn what the server refused into what a user must be told."""
        database, host = self.subject.database, self.session.host
        match error.sqlstate:
            case "42501":
                return RightsError(refusals.no_right_to_jobs(error.message, database, self.role))
            case "25006":  # read-only transaction, although we asked for another
                return ConfigError(refusals.standby(self.purpose, self.subject))
            case "55P03":
                return UnreachableError(refusals.queue_locked(database, LOCK_TIMEOUT))
        if error.sqlstate.startswith(("22", "0A")):
            return UsageError(refusals.not_taken(error.sqlstate, error.message))
        return UnreachableError(refusals.statement_refused(host, error.sqlstate, error.message))

    @property
    def role(self) -> str:
        """Whom the server takes us for."""
        return self.session.pgconn.user.decode("utf-8", "replace")

    # Statements

    def prepared(self) -> Conversation[None]:
        """Connect where needed, and see that the server and the schema are the right ones."""
        if not (yield from self.connected()):
            return
        rows = yield from self.ask(self.statements["session_facts"])
        pid, in_recovery = rows[0]
        if in_recovery == "t":
            raise ConfigError(refusals.standby(self.purpose, self.subject))
        self.is_own = self.session.pgconn.backend_pid == int(pid or 0)
        if self.is_own:
            own = (self.statements["prepare_own"], ())
            yield from execute_together(self.session, [*self.preparation(is_local=False), own], now() + self.patience)
        if self.check_version:
            yield from self.verify_version()

    def preparation(
        self, *, is_local: bool, statement_timeout: float = STATEMENT_TIMEOUT
    ) -> list[tuple[str, Sequence[object]]]:
        """Give what makes a session, or one transaction of it, independent of the role's defaults."""
        limits = [f"{LOCK_TIMEOUT * 1000:.0f}", f"{statement_timeout * 1000:.0f}", is_local]
        first: list[tuple[str, Sequence[object]]] = [(self.statements["prepare"], limits)]
        if self.session.pgconn.server_version >= 170000:
            first.append((self.statements["prepare_transaction"], [is_local]))
        return first

    def verify_version(self) -> Conversation[None]:
        """Refuse a schema that is not of this program's version.

        Raises:
            ConfigError: there is none, or it is older or newer.
        """
        database, schema = self.subject.database, self.jobs.schema
        try:
            rows = yield from self.ask_prepared("version")
        except StatementError as error:
            if error.sqlstate in ("42P01", "3F000"):  # no such table, no such schema
                raise ConfigError(refusals.no_queue(schema, database)) from None
            raise
        version = read_version(rows)
        if version < SCHEMA_VERSION:
            raise ConfigError(refusals.schema_older(schema, database, version, SCHEMA_VERSION))
        if version > SCHEMA_VERSION:
            raise ConfigError(refusals.schema_newer(schema, database, version, SCHEMA_VERSION))

    def run(self, name: str, params: Sequence[object] = ()) -> Conversation[list[Row]]:
        """Run one statement as a transaction of its own; where the server asks for it, again."""
        yield from self.prepared()
        return (yield from again(lambda: self.ask_prepared(name, params)))

    def ask_prepared(self, name: str, params: Sequence[object] = ()) -> Conversation[list[Row]]:
        query = self.statements[name]
        if self.is_own:
            return (yield from self.ask(query, params))
        begin, commit = self.statements["begin"], self.statements["commit"]
        together = [(begin, ()), *self.preparation(is_local=True), (query, params), (commit, ())]
        try:
            answers = yield from execute_together(self.session, together, now() + self.patience)
        except StatementError:
            yield from execute(self.session, self.statements["rollback"], (), now() + self.patience)
            raise
        return answers[-2]

    def in_transaction(
        self, make: Callable[[], Conversation[T]], *, statement_timeout: float = STATEMENT_TIMEOUT
    ) -> Conversation[T]:
        """Carry out several statements as one transaction; an error of any of them undoes all."""
        yield from self.ask(self.statements["begin"])
        try:
            for query, params in self.preparation(is_local=True, statement_timeout=statement_timeout):
                yield from self.ask(query, params)
            result = yield from make()
        except (StatementError, BatchguardError):
            yield from self.ask(self.statements["rollback"])
            raise
        yield from self.commit()
        return result

    def commit(self) -> Conversation[None]:
        yield from self.ask(self.statements["commit"])

    # What workers do

    def claim(self, queue: str, limit: int, lease: float, token: str) -> Conversation[list[ClaimedJob]]:
        """Claim up to `limit` jobs of one queue, in their order.

        A payload that the server cannot print, or that is larger than the setting allows, makes its job fail for
        good: it would hold up all those behind it for ever.

        Args:
            queue: whose jobs.
            limit: how many at most.
            lease: seconds for which they are ours.
            token: a new one for each claim; with one that was used before, what was claimed with it comes first.
        """
        params = [queue, limit, token, lease, socket.gethostname()]
        largest = self.jobs.max_payload + QUOTES
        try:
            rows = yield from self.run("claim", [*params, largest])
        except StatementError as error:
            if error.sqlstate not in NOT_PRINTABLE:
                raise
            rows = yield from self.run("claim", [*params, -1])
        return (yield from self.read_payloads(rows, lease, token))

    def claimed(self, lease: float, token: str) -> Conversation[list[ClaimedJob]]:
        """Give what a claim with this token got whose answer was lost."""
        rows = yield from self.run("claimed", [token])
        return (yield from self.read_payloads(rows, lease, token))

    def read_payloads(self, rows: Sequence[Row], lease: float, token: str) -> Conversation[list[ClaimedJob]]:
        """Give jobs in their order; payloads that did not come are read one by one, and who has none fails for good."""
        jobs = []
        claimed = [read_claimed(row, token, lease, self.jobs.schema) for row in rows]
        for job in sorted(claimed, key=lambda job: job.place):
            if job.payload:
                jobs.append(job)
                continue
            try:
                found = yield from self.run("payload", [job.id, token, self.jobs.max_payload + QUOTES])
                payload, key = found[0] if found else (None, None)
                why = f"the payload is larger than max_payload, {self.jobs.max_payload} bytes"
            except StatementError as error:
                if error.sqlstate not in NOT_PRINTABLE:
                    raise
                payload = key = None
                why = f"the server cannot print the payload ({error.sqlstate}: {error.message})"
            if payload is not None:
                jobs.append(replace(job, payload=payload, dedupe_key=key))
            else:
                yield from self.end("fail", [Claim(job.id, token, Ending(True, reason="payload", error=why))])
        return jobs

    def end(self, verb: Verb, claims: Sequence[Claim]) -> Conversation[list[Result]]:
        """Complete, fail, release or extend jobs; each may be repeated after a lost answer.

        Returns:
            what became of each, in the order of the claims.
        """
        results: dict[tuple[int, str], Result] = {}
        for token, ending, ids in group_claims(claims):
            for begin in range(0, len(ids), CHUNK):
                chunk = ids[begin : begin + CHUNK]
                changed = _statuses((yield from self.end_chunk(verb, chunk, token, ending)))
                missing = [id_ for id_ in chunk if id_ not in changed]
                recalled = _statuses((yield from self.run("recall", [missing, token]))) if missing else {}
                results.update({(each.id, token): each for each in results_of(verb, chunk, changed, recalled)})
        return [results[claim.id, claim.token] for claim in claims]

    def end_chunk(self, verb: Verb, ids: Sequence[int], token: str, ending: Ending) -> Conversation[list[Row]]:
        try:
            return (yield from self.run(verb, [ids, token, *self.params_of(verb, ending)]))
        except StatementError as error:
            if error.sqlstate != UNTRANSLATABLE or ending.error is None or ending.error.isascii():
                raise
        # Better an error text with escapes than a job that cannot fail.
        plain = ending.error.encode("ascii", "backslashreplace").decode()
        return (yield from self.run(verb, [ids, token, *self.params_of(verb, replace(ending, error=plain))]))

    def params_of(self, verb: Verb, ending: Ending) -> list[object]:
        """Give what a statement takes besides ids and token."""
        match verb:
            case "fail":
                backoff, longest = self.jobs.backoff, self.jobs.backoff_max
                reason = ending.reason or ("no retry" if ending.is_final else "exit" if ending.exit_code else None)
                code, error = ending.exit_code, ending.error
                return [ending.is_final, ending.retry_in, backoff, longest, code, reason, error]
            case "extend":
                return [ending.lease or self.jobs.lease]
            case _:
                return []

    def reap(self, limit: int = REAP_LIMIT) -> Conversation[list[str]]:
        """Take jobs back whose lease has expired.

        Returns:
            what each is now: pending, or failed after its last attempt.
        """
        rows = yield from self.run("reap", [limit, self.jobs.backoff, self.jobs.backoff_max])
        return [status or "" for _, status in rows]

    def claim_once(self, queue: str, limit: int, lease: float, token: str) -> list[ClaimedJob]:
        """Claim as `claim` does; where the answer is lost, what was claimed is looked up.

        Raises:
            BatchguardError: a line for the user.
        """
        is_repeated = False

        def attempt() -> Conversation[list[ClaimedJob]]:
            nonlocal is_repeated
            if not is_repeated:
                is_repeated = True
                return (yield from self.claim(queue, limit, lease, token))
            found = yield from self.claimed(lease, token)
            if not found:
                yield from self.claim(queue, limit, lease, token)
                found = yield from self.claimed(lease, token)  # the first one may have been under way still
            yield from self.end("release", [Claim(job.id, token) for job in found[limit:]])
            return found[:limit]

        return self.persist(attempt)

    def release_all(self, tokens: Sequence[str], but: Sequence[int] = ()) -> Conversation[int]:
        """Release what was claimed with these tokens, also by a claim whose answer never came, and count it."""
        count = 0
        for token in tokens:
            rows = yield from self.run("claimed", [token])
            claims = [Claim(int(row[0] or 0), token) for row in rows]
            count += len((yield from self.end("release", [claim for claim in claims if claim.id not in but])))
        return count


def again(make: Callable[[], Conversation[T]]) -> Conversation[T]:
    """Carry out a transaction; where the server asks for it, once more, up to ten times."""
    for _ in range(TRIES - 1):
        try:
            return (yield from make())
        except StatementError as error:
            if error.sqlstate not in AGAIN:
                raise
        yield from pause(random.uniform(0.01, 0.1))
    return (yield from make())


def _statuses(rows: Sequence[Row]) -> Mapping[int, str]:
    return {int(id_ or 0): status or "" for id_, status in rows}


def new_token() -> str:
    """Make a claim token; nobody else makes the same."""
    return str(uuid.uuid4())
