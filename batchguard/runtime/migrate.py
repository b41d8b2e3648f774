"""`batchguard jobs migrate`: makes the queue's table, or brings it up to date; many hosts may do so at once."""

import contextlib
from collections.abc import Sequence

from batchguard.adapters.job_store import (
    SCHEMA_VERSION,
    migrations,
    quote_identifier,
    quote_literal,
    read_version,
    statements_in,
    statements_of,
)
from batchguard.adapters.postgres import Conversation, load_queries
from batchguard.core import refusals
from batchguard.core.errors import ConfigError
from batchguard.core.job_settings import JobSettings
from batchguard.runtime.queue import Queue, again


def migrate(dsn: str, settings: JobSettings) -> tuple[int, int]:
    """Bring the schema up to this program's version, all or nothing.

    Returns:
        the version before (0: there was none) and the one after.

    Raises:
        BatchguardError: a line for the user.
    """
    with contextlib.closing(_Migration(dsn, settings)) as migration:
        return migration.persist(migration.carry_out)


class _Migration(Queue):
    def __init__(self, dsn: str, settings: JobSettings) -> None:
        super().__init__(dsn, settings, "migrate", check_version=False)

    def carry_out(self) -> Conversation[tuple[int, int]]:
        yield from self.prepared()
        before = yield from again(lambda: self.in_transaction(self.change))
        return before, SCHEMA_VERSION

    def change(self) -> Conversation[int]:
        yield from self.ask(self.statements["lock_migration"], [self.quoted_schema])
        before = yield from self.version()
        if before > SCHEMA_VERSION:
            database = self.subject.database
            raise ConfigError(refusals.schema_newer(self.jobs.schema, database, before, SCHEMA_VERSION))
        missing = migrations(before, self.jobs.schema)
        if not missing:
            return before
        if before == 0:
            yield from self.all(self.statements["create_version"])
        for _, script in missing:
            yield from self.all(script)
        yield from self.ask(_set_version(self.statements["set_version"]))
        return before

    def version(self) -> Conversation[int]:
        """Find out what is there, and make the schema where it is not."""
        rows = yield from self.ask(self.statements["look_for_schema"], [self.quoted_schema])
        has_schema, has_jobs, has_version = (value == "t" for value in rows[0])
        if not has_schema:
            yield from self.ask(self.statements["create_schema"])
        if not has_version:
            if has_jobs:
                raise ConfigError(refusals.strange_table(self.jobs.schema, self.subject.database))
            return 0
        rows = yield from self.ask(self.statements["version"])
        return read_version(rows)

    def all(self, script: str) -> Conversation[None]:
        for statement in statements_of(script):
            yield from self.ask(statement)


def _set_version(statement: str) -> str:
    return statement.replace("{version}", str(SCHEMA_VERSION))


def dump_sql(settings: JobSettings) -> str:
    """Write down what `migrate` does in a database without a queue, for psql; a second time it changes nothing."""
    schema = quote_identifier(settings.schema)
    queries = statements_in(load_queries("jobs"), settings.schema)
    scripts: Sequence[str] = [text.strip() for _, text in migrations(0, settings.schema)]
    parts = [
        f"-- The queue of batchguard, version {SCHEMA_VERSION}. Run it with: psql -f FILE",
        "BEGIN;",
        "SET LOCAL lock_timeout = '10s';",
        queries["lock_migration"].replace("$1", quote_literal(schema)) + ";",
        f"CREATE SCHEMA IF NOT EXISTS {schema};",
        queries["create_version"] + ";",
        *scripts,
        _set_version(queries["set_version"]) + ";",
        "COMMIT;",
    ]
    return "\n\n".join(parts)
