"""What `doctor` makes of the facts it has gathered: each finding one line, with what to do."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from batchguard.core.durations import format_duration
from batchguard.core.timing import Timing

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Diagnosis:
    """One finding; `fix` says what to do and is None where there is nothing to do."""

    id: str
    level: Level
    subject: str
    message: str
    fix: str | None = None
    value: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """Give the finding as JSON names it."""
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """One setting of the session as the server gave it, and where it comes from (`pg_settings.source`)."""

    value: str
    source: str


@dataclass(frozen=True)
class ServerFacts:
    """What the server told about itself, our session and our role; durations in seconds."""

    place: str
    role: str
    quoted_role: str
    system_id: str
    version: str
    is_primary: bool
    same_backend: bool
    lacking_functions: Sequence[str] = ()
    has_monitor: bool = False
    has_signal: bool = False
    over_socket: bool = False
    server_ttl: float | None = None
    probes_ttl: float | None = None
    clock_ahead_s: float = 0.0
    defaults: Mapping[str, Setting] = field(default_factory=dict)
    synchronous_names: str = ""
    synchronous_standbys: int = 0


WORST_CLOCK = 5.0
"""Seconds by which a host's clock may differ before two crons are likely to start the same short batch one after the
other."""

_HARMLESS = {
    "statement_timeout": ("0",),
    "lock_timeout": ("0",),
    "idle_session_timeout": ("0",),
    "idle_in_transaction_session_timeout": ("0",),
    "transaction_timeout": ("0",),
    "default_transaction_isolation": ("read committed",),
    "default_transaction_read_only": ("off",),
    "synchronous_commit": ("on", "local", "remote_write", "remote_apply"),
}
"""Values of session settings that do no harm to a batch; every other one is pointed out."""

DEFAULTS_THAT_BITE = tuple(_HARMLESS)


def diagnose_timing(name: str, timing: Timing) -> Diagnosis:
    """Show a safe timing chain with its sum; an unsafe one is a fault of the number table."""
    message = f"{timing.chain}, below ttl {format_duration(timing.ttl)}"
    return Diagnosis("timing", "ok", f"timing {name}", message, value=f"{timing.window:g}")


def diagnose_server(facts: ServerFacts, timing: Timing, *, allow_pooler: bool) -> Iterator[Diagnosis]:
    """Judge a server that answered."""
    yield Diagnosis(
        "database",
        "ok",
        facts.place,
        f"PostgreSQL {facts.version}, system {facts.system_id}; keys exclude within this database only",
        value=facts.system_id,
    )
    if not facts.is_primary:
        yield Diagnosis(
            "primary",
            "error",
            facts.place,
            "is a standby, and its locks exclude nobody",
            "list all hosts in the dsn, or name the primary",
        )
        return
    yield Diagnosis("primary", "ok", facts.place, "takes writes")
    yield _pooler(facts, allow_pooler=allow_pooler)
    yield from _rights(facts)
    if facts.same_backend:  # what is set in a pooled session may stay there, so it was not tried
        yield _keepalive(facts, timing)
    yield from _defaults(facts)
    yield _clock(facts)
    if facts.synchronous_names and facts.has_monitor and not facts.synchronous_standbys:
        yield Diagnosis(
            "synchronous_standby",
            "error",
            facts.place,
            f"synchronous_standby_names is {facts.synchronous_names!r} and no such standby is connected: no commit "
            "ends, so that no run gets its fencing token",
            "bring a standby back, or clear synchronous_standby_names",
        )


def _pooler(facts: ServerFacts, *, allow_pooler: bool) -> Diagnosis:
    if facts.same_backend:
        return Diagnosis("pooler", "ok", facts.place, "no pooler in between")
    if allow_pooler:
        return Diagnosis(
            "pooler",
            "warning",
            facts.place,
            "is reached through a pooler, which allow_pooler says gives each client a session of its own; that cannot "
            "be seen from here, and ttl is measured between server and pooler",
            "connect directly where that is possible",
        )
    return Diagnosis(
        "pooler",
        "error",
        facts.place,
        "is reached through a pooler that may share sessions: two runs could both hold a lock",
        "connect directly; if it pools whole sessions, set allow_pooler",
    )


def _rights(facts: ServerFacts) -> Iterator[Diagnosis]:
    if facts.lacking_functions:
        functions = ", ".join(facts.lacking_functions)
        yield Diagnosis(
            "lock_functions",
            "error",
            facts.role,
            f"may not execute {functions}",
            f"GRANT EXECUTE ON FUNCTION {functions} TO {facts.quoted_role};",
        )
    else:
        yield Diagnosis("lock_functions", "ok", facts.role, "may execute every advisory lock function")
    if facts.has_monitor:
        yield Diagnosis("pg_monitor", "ok", facts.role, "sees other roles' sessions")
    else:
        yield Diagnosis(
            "pg_monitor",
            "note",
            facts.role,
            "does not see whose session holds a lock since when, and estimates how long after a failover to wait",
            f"GRANT pg_monitor TO {facts.quoted_role};",
        )
    if facts.has_signal:
        yield Diagnosis("pg_signal_backend", "ok", facts.role, "may end other roles' sessions (force-unlock)")
    else:
        yield Diagnosis(
            "pg_signal_backend",
            "note",
            facts.role,
            "may end sessions of its own only (force-unlock)",
            f"GRANT pg_signal_backend TO {facts.quoted_role};",
        )


def _keepalive(facts: ServerFacts, timing: Timing) -> Diagnosis:
    if facts.over_socket:
        return Diagnosis(
            "keepalive",
            "note",
            facts.place,
            "is reached over a Unix socket, which has no keepalives: the end of a process on this host is seen at "
            "once, but what is behind a proxy is not",
            "for runs on other hosts use TCP",
        )
    effective = facts.server_ttl or facts.probes_ttl
    if effective is None:
        return Diagnosis(
            "keepalive",
            "warning",
            facts.place,
            "does not say after what silence it gives a session up: a host that vanishes may keep its lock for hours",
            "look at tcp_keepalives_idle and tcp_user_timeout on the server's platform",
        )
    if effective <= timing.window:
        return Diagnosis(
            "keepalive",
            "error",
            facts.place,
            f"gives a silent session up after {format_duration(effective)}, before a batch is surely dead "
            f"({format_duration(timing.window)})",
            "lower check_timeout or kill_after",
            f"{effective:g}",
        )
    return Diagnosis(
        "keepalive",
        "ok",
        facts.place,
        f"gives a silent session up after {format_duration(effective)}",
        value=f"{effective:g}",
    )


def _defaults(facts: ServerFacts) -> Iterator[Diagnosis]:
    bites = False
    for name, setting in facts.defaults.items():
        if setting.value in _HARMLESS[name]:
            continue
        bites = True
        yield Diagnosis(
            "role_default",
            "warning",
            name,
            f"is {setting.value} by default ({_SOURCES.get(setting.source, setting.source)}): batchguard's own "
            "sessions set it aside, those of your batch do not",
            _reset(facts, name, setting.source),
            setting.value,
        )
    if not bites:
        yield Diagnosis("role_default", "ok", facts.role, "has no default that would end or bend a batch's sessions")


_SOURCES = {
    "user": "of the role",
    "database": "of the database",
    "database user": "of the role in this database",
    "configuration file": "of the server",
    "client": "of the dsn or PGOPTIONS",
}


def _reset(facts: ServerFacts, name: str, source: str) -> str:
    match source:
        case "user" | "database user":
            where = " IN DATABASE …" if source == "database user" else ""
            return f"ALTER ROLE {facts.quoted_role}{where} RESET {name}; or set it in the batch"
        case "database":
            return f"ALTER DATABASE … RESET {name}; or set it in the batch"
        case "client":
            return "take it out of the dsn's options, or out of PGOPTIONS"
    return f"ALTER ROLE {facts.quoted_role} SET {name} = {_HARMLESS[name][0]!r};"


def _clock(facts: ServerFacts) -> Diagnosis:
    ahead = facts.clock_ahead_s
    if abs(ahead) < WORST_CLOCK:
        return Diagnosis("clock", "ok", "this host's clock", f"agrees with the server's to {abs(ahead):.1f}s")
    side = "ahead of" if ahead > 0 else "behind"
    return Diagnosis(
        "clock",
        "warning",
        "this host's clock",
        f"is {format_duration(abs(ahead))} {side} the server's: a short batch may run on two hosts one after the other",
        "run NTP on every host; min_hold keeps a lock for a while",
        f"{ahead:.1f}",
    )
