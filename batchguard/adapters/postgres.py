"""PostgreSQL connections that never block: conversations which say what they wait for.

A conversation is a generator. It yields a `Wait` and is sent the poll(2) events that came, 0 when
its time is over. Who drives it decides what else is watched meanwhile; closing it ends it.
"""

import os
import re
import select
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from math import inf
from pathlib import Path
from typing import NoReturn, TypeVar

import psycopg
from psycopg import OperationalError
from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo, ConnStatus, ExecStatus, PGconn, PipelineStatus, PollingStatus, Trace
from psycopg.pq import abc as pq

from batchguard.adapters.clock import now
from batchguard.core.errors import ConfigError

T = TypeVar("T")

READ = select.POLLIN
WRITE = select.POLLOUT
CLIENT_TCP_SLACK = 2.0
"""How many times the server's ttl our own kernel keeps an unanswered connection: it must never be the first to give
up, since the RST it would send frees the lock at once."""


LONGEST_IDLE = 32767
"""Seconds: the kernel refuses a longer TCP_KEEPIDLE (tcp(7)); tcp_user_timeout decides in any case."""


@dataclass(frozen=True)
class Wait:
    """Until `fd` is ready for `events`, or `until` (seconds of CLOCK_BOOTTIME) has come."""

    fd: int
    events: int
    until: float = inf


Conversation = Generator[Wait, int, T]


def drive(conversation: Conversation[T], sleep: Callable[[Wait], int]) -> T:
    """Carry a conversation on to its end; `sleep` waits, no longer than it likes, and gives the events that came."""
    try:
        wait = next(conversation)
        while True:
            ready = sleep(wait)
            if ready or now() >= wait.until:
                wait = conversation.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result


Row = tuple[str | None, ...]


class ConnectFailedError(Exception):
    """No server could be reached; one entry of `attempts` for each address that was tried."""

    def __init__(self, attempts: Sequence["FailedAttempt"]) -> None:
        super().__init__(attempts)
        self.attempts = tuple(attempts)


@dataclass(frozen=True)
class FailedAttempt:
    """Why one address did not do; `sqlstate` when a server answered, `standby` when it is one."""

    host: str
    why: str
    sqlstate: str | None = None
    needs_password: bool = False
    standby: bool = False


class SessionEndedError(Exception):
    """The session is over; `sqlstate` is the server's last word, None when it had none."""

    def __init__(self, sqlstate: str | None) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate

    @property
    def reason(self) -> str:
        """The server's last word, or that it had none."""
        return self.sqlstate or "connection closed"


class StatementError(Exception):
    """The server refused a statement; the session lives."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(sqlstate, message)
        self.sqlstate = sqlstate
        self.message = message


class TimedOutError(Exception):
    """An answer did not come in time; the session is in the middle of it."""


@dataclass
class Session:
    """One connection to one backend, with the notices that the server sent since the last statement."""

    pgconn: pq.PGconn
    params: Mapping[str, str]
    warnings: list[str] = field(default_factory=list)
    last_sqlstate: str | None = None

    @property
    def host(self) -> str:
        """Where the server is, as `host:port` or as the folder of its socket."""
        return host_text(self.params)

    @property
    def fd(self) -> int:
        """The socket's descriptor."""
        return self.pgconn.socket

    def close(self) -> None:
        """Tell the server goodbye and close; unlike shutdown(2), the kernel still delivers what was sent."""
        self.pgconn.finish()


def host_text(params: Mapping[str, str]) -> str:
    """Write host and port as people do."""
    host = params.get("host") or params.get("hostaddr") or "/var/run/postgresql"
    return host if host.startswith(("/", "@")) else f"{host}:{params.get('port') or 5432}"


def resolve_parameters(dsn: str) -> dict[str, str]:
    """Give every libpq parameter that counts: the DSN's, then its service's, then PG* and libpq's defaults.

    Raises:
        ConfigError: the DSN is no conninfo or URI, or its service is unknown.
    """
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    except psycopg.Error as error:
        raise ConfigError(f"the dsn does not read: {str(error).strip()}. Not started, exit 78.") from error
    for name, variable in (("service", "PGSERVICE"), ("servicefile", "PGSERVICEFILE")):
        if name in given:
            os.environ[variable] = given.pop(name)  # PQconndefaults knows the service file only through these
    return {**_defaults(), **given}


def _defaults() -> dict[str, str]:
    """Give libpq's defaults: of the service, of PG*, built in.

    Raises:
        ConfigError: the service is unknown; libpq passes over that here, and would use the local default.
    """
    defaults = _read_defaults()
    if service := os.environ.pop("PGSERVICE", None):
        if defaults == _read_defaults():
            raise ConfigError(
                f'service "{service}" is unknown, or sets nothing: looked in PGSERVICEFILE, ~/.pg_service.conf and the '
                "system's pg_service.conf. Not started, exit 78."
            )
        os.environ["PGSERVICE"] = service
    return defaults


def _read_defaults() -> dict[str, str]:
    options = ((option.keyword.decode(), option.val) for option in Conninfo.get_defaults())
    return {name: value.decode() for name, value in options if value is not None and not name.startswith("service")}


def session_parameters(params: Mapping[str, str], application: str, ttl: float) -> dict[str, str]:
    """Add what a session that holds a lock needs, whatever the DSN says.

    Args:
        params: from `resolve_parameters`.
        application: what the session calls itself; ASCII, since the server turns the rest into `?`.
        ttl: seconds after which the server gives a silent session up.
    """
    patience = CLIENT_TCP_SLACK * ttl + 1
    text = application.encode("ascii", "replace").decode()[:63]
    forced = {
        "application_name": text,
        "client_encoding": "UTF8",
        "keepalives": "1",
        "keepalives_idle": f"{min(patience, LONGEST_IDLE):.0f}",
        "tcp_user_timeout": f"{patience * 1000:.0f}",
    }
    dropped = {"target_session_attrs", "connect_timeout", "fallback_application_name"}
    return {name: value for name, value in params.items() if name not in dropped} | forced


def connect(params: Mapping[str, str], timeout: float) -> Conversation[Session]:
    """Connect to the first address that is a primary; each address has its own `timeout` (seconds).

    libpq cannot do this without blocking: its asynchronous connect looks names up in the
    foreground and knows no time limit. Whether a server is a primary it reports by itself since
    PostgreSQL 14 (in_hot_standby); a pooler may keep it back, so that the first statement asks again.

    Raises:
        ConnectFailedError: no address did.
    """
    failed: list[FailedAttempt] = []
    attempts = yield from _resolve(params, timeout)
    if isinstance(attempts, str):
        raise ConnectFailedError([FailedAttempt(host_text(params), attempts)])
    for attempt in attempts:
        outcome = yield from _connect_once(attempt, timeout)
        if isinstance(outcome, FailedAttempt):
            failed.append(outcome)
        elif outcome.pgconn.parameter_status(b"in_hot_standby") == b"on":
            outcome.close()
            failed.append(FailedAttempt(outcome.host, "it is a standby", standby=True))
        else:
            return outcome
    raise ConnectFailedError(failed)


def _resolve(params: Mapping[str, str], timeout: float) -> Conversation[list[dict[str, str]] | str]:
    """Turn host names into addresses, in a thread: a resolver may take minutes, and signals must not wait."""
    hosts = params.get("host", "").split(",")
    if params.get("hostaddr") or not any(_is_name(host) for host in hosts):
        return _look_up(params)
    answer: list[list[dict[str, str]] | str] = []
    done, finished = socket.socketpair()

    def look_up() -> None:
        with finished:  # its end is the signal; nobody may be waiting for it any more
            answer.append(_look_up(params))

    with done:
        try:
            threading.Thread(target=look_up, daemon=True).start()
        except RuntimeError:
            finished.close()
            return "the system refused a thread to look its name up; raise ulimit -u, or pids.max of the control group"
        yield Wait(done.fileno(), READ, now() + timeout * len(hosts))
    return answer[0] if answer else "its name could not be looked up in time"


def _is_name(host: str) -> bool:
    """Tell a name that must be looked up from an address, the folder of a socket, and nothing."""
    if not host or host.startswith(("/", "@")):
        return False
    try:
        ip_address(host)
    except ValueError:
        return True
    return False


def _look_up(params: Mapping[str, str]) -> list[dict[str, str]] | str:
    """Give the parameters of each address, or why there is none."""
    try:
        attempts = conninfo_attempts(dict(params))
    except (OperationalError, OSError, UnicodeError) as error:
        return str(error)
    return [{name: str(value) for name, value in attempt.items()} for attempt in attempts]


def _connect_once(params: Mapping[str, str], timeout: float) -> Conversation[Session | FailedAttempt]:
    until = now() + timeout
    pgconn = PGconn.connect_start(make_conninfo("", **params).encode())
    session = Session(pgconn, params)
    # libpq keeps the SQLSTATE of a refused login to itself; its protocol trace has it. Text is localised.
    with os.fdopen(os.memfd_create("libpq-trace"), "r+b", buffering=0) as trace:
        pgconn.trace(trace.fileno())
        pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
        status: int = PollingStatus.WRITING
        while pgconn.status != ConnStatus.BAD and status in (PollingStatus.READING, PollingStatus.WRITING):
            ready = yield Wait(pgconn.socket, READ if status == PollingStatus.READING else WRITE, until)
            if not ready:
                pgconn.untrace()
                pgconn.finish()
                return FailedAttempt(session.host, f"no answer within {timeout:g}s")
            status = pgconn.connect_poll()
        pgconn.untrace()
        if status == PollingStatus.OK and pgconn.status == ConnStatus.OK:
            pgconn.nonblocking = 1
            _listen_to_notices(session)
            return session
        trace.seek(0)
        codes = re.findall(rb'ErrorResponse\t.*? C "([0-9A-Z]{5})"', trace.read())
    failed = FailedAttempt(
        session.host,
        _reason(pgconn.error_message.decode("utf-8", "replace")),
        codes[-1].decode() if codes else None,
        pgconn.needs_password,
    )
    pgconn.finish()
    return failed


def _reason(message: str) -> str:
    """Cut libpq's several lines down to what went wrong."""
    first = message.strip().splitlines()[0] if message.strip() else "no reason given"
    reason = first.rpartition(" failed: ")[2]
    reason = reason.removeprefix("FATAL:").strip()
    return reason[:1].lower() + reason[1:] if not reason.startswith(("SSL", "SCRAM")) else reason


def _listen_to_notices(session: Session) -> None:
    def note(result: pq.PGresult) -> None:
        sqlstate = (result.error_field(67) or b"").decode()  # PG_DIAG_SQLSTATE
        severity = result.error_field(86) or b""  # PG_DIAG_SEVERITY_NONLOCALIZED
        if severity in (b"FATAL", b"PANIC") or sqlstate.startswith("57P0"):
            session.last_sqlstate = sqlstate  # an immediate shutdown and a crash are announced as mere warnings
        elif severity == b"WARNING":
            session.warnings.append(
                (result.error_field(77) or b"").decode("utf-8", "replace")
            )  # PG_DIAG_MESSAGE_PRIMARY

    session.pgconn.notice_handler = note


def execute(session: Session, sql: str, params: Sequence[object] = (), until: float = inf) -> Conversation[list[Row]]:
    """Run one statement and give its rows as text; parameters are written `$1`.

    Raises:
        StatementError: the server refused it.
        SessionEndedError: the session ended before the answer.
        TimedOutError: `until` (CLOCK_BOOTTIME) came first.
    """
    session.warnings.clear()
    try:
        _send(session, sql, params)
        yield from _flush(session, until)
        results = yield from _read_results(session, until)
    except OperationalError:
        _session_ended(session)
    return [row for result in results for row in _rows(session, result)]


def execute_together(
    session: Session, statements: Sequence[tuple[str, Sequence[object]]], until: float = inf
) -> Conversation[list[list[Row]]]:
    """Run several statements in one round trip and give the rows of each; the first error is raised.

    Raises:
        StatementError: the server refused one; those after it were not carried out.
        SessionEndedError: the session ended before the last answer.
        TimedOutError: `until` (CLOCK_BOOTTIME) came first.
    """
    session.warnings.clear()
    try:
        session.pgconn.enter_pipeline_mode()
        for sql, params in statements:
            _send(session, sql, params)
        session.pgconn.pipeline_sync()
        yield from _flush(session, until)
        answers = []
        for _ in statements:
            answers += [(yield from _read_results(session, until))]
        # What follows the sync's own result is not the next statement's end: there is none.
        yield from _next_result(session, until)
        if session.pgconn.pipeline_status != PipelineStatus.OFF:
            session.pgconn.exit_pipeline_mode()
    except OperationalError:
        _session_ended(session)
    return [[row for result in results for row in _rows(session, result)] for results in answers]


def copy_in(session: Session, sql: str, chunks: Iterable[bytes], patience: float) -> Conversation[None]:
    """Carry out a COPY … FROM STDIN in the text format.

    Args:
        session: where.
        sql: the statement.
        chunks: what is copied, in pieces of any size.
        patience: seconds that the server may take for one piece, and for the end.

    Raises:
        StatementError: the server refused the statement or a line.
        SessionEndedError: the session ended before the answer.
        TimedOutError: the server took longer.
    """
    session.warnings.clear()
    try:
        _send(session, sql)
        yield from _flush(session, now() + patience)
        result = yield from _next_result(session, now() + patience)
        if result is not None and result.status == ExecStatus.COPY_IN:
            for chunk in chunks:
                while session.pgconn.put_copy_data(chunk) == 0:  # its buffer has no room
                    yield from _flush(session, now() + patience)
                yield from _flush(session, now() + patience)
            while session.pgconn.put_copy_end() == 0:
                yield from _flush(session, now() + patience)
            yield from _flush(session, now() + patience)
            result = None
        more = yield from _read_results(session, now() + patience)
    except OperationalError:
        _session_ended(session)
    if result is not None:  # what came in place of the leave to copy
        _note_last_word(session, result)
        _rows(session, result)
    for each in more:
        _rows(session, each)


def _send(session: Session, sql: str, params: Sequence[object] = ()) -> None:
    values = [None if value is None else _text(value) for value in params]
    session.pgconn.send_query_params(sql.encode(), values)


def _flush(session: Session, until: float) -> Conversation[None]:
    """Get rid of what is to be sent, and take in meanwhile what the server says: it may be waiting for that."""
    while session.pgconn.flush():
        ready = yield Wait(session.fd, READ | WRITE, until)
        if not ready:
            raise TimedOutError
        if ready & READ:
            session.pgconn.consume_input()


def _read_results(session: Session, until: float) -> Conversation[list[pq.PGresult]]:
    """Read all of them, an error's successor too: a session with an unread result takes no other statement."""
    results = []
    while (result := (yield from _next_result(session, until))) is not None:
        _note_last_word(session, result)
        results.append(result)
    return results


def finish_statement(session: Session, until: float = inf) -> Conversation[None]:
    """Read what is left of the answer to a statement whose conversation was ended; only then is there another.

    Raises:
        SessionEndedError: the session ended before the answer.
        TimedOutError: `until` (CLOCK_BOOTTIME) came first.
    """
    try:
        yield from _read_results(session, until)
    except OperationalError:
        _session_ended(session)


def _text(value: object) -> bytes:
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, list | tuple):
        return b"{" + b",".join(b"NULL" if item is None else _quoted(_text(item)) for item in value) + b"}"
    return str(value).encode()


def _quoted(item: bytes) -> bytes:
    return b'"' + item.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def _next_result(session: Session, until: float) -> Conversation[pq.PGresult | None]:
    while session.pgconn.is_busy():
        if not (yield Wait(session.fd, READ, until)):
            raise TimedOutError
        session.pgconn.consume_input()
    return session.pgconn.get_result()


def _note_last_word(session: Session, result: pq.PGresult) -> None:
    """Keep why the server ends the session: what follows is a broken connection, which has no reason."""
    if (result.error_field(86) or b"") in (b"FATAL", b"PANIC"):  # PG_DIAG_SEVERITY_NONLOCALIZED
        session.last_sqlstate = (result.error_field(67) or b"").decode()


def _rows(session: Session, result: pq.PGresult) -> list[Row]:
    if result.status in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
        return [
            tuple(
                None if (value := result.get_value(row, column)) is None else value.decode("utf-8", "replace")
                for column in range(result.nfields)
            )
            for row in range(result.ntuples)
        ]
    sqlstate = (result.error_field(67) or b"").decode()
    if session.pgconn.status == ConnStatus.BAD or session.last_sqlstate:
        _session_ended(session)
    raise StatementError(sqlstate, (result.error_field(77) or b"").decode("utf-8", "replace"))


def _session_ended(session: Session) -> NoReturn:
    raise SessionEndedError(session.last_sqlstate)


def notifications(session: Session) -> list[tuple[int, str]]:
    """Give the notifications that have come since the last call: the backend of each, and its payload."""
    found = []
    while (notification := session.pgconn.notifies()) is not None:
        found.append((notification.be_pid, notification.extra.decode("utf-8", "replace")))
    return found


def watch(session: Session, until: float = inf) -> Conversation[None]:
    """Watch an idle session until it ends, or until `until` (CLOCK_BOOTTIME).

    Readable means "look", not "lost": the server also sends parameter changes and notices.

    Raises:
        SessionEndedError: the server said so, or the connection broke.
    """
    while True:
        try:
            if not (yield Wait(session.fd, READ, until)):
                return
            session.pgconn.consume_input()
            session.pgconn.is_busy()
        except OperationalError:
            _session_ended(session)
        if session.pgconn.status == ConnStatus.BAD or session.last_sqlstate:
            _session_ended(session)


def load_queries(name: str) -> dict[str, str]:
    """Read the named statements of `sql/NAME.sql`: each follows a line `-- name: …`; comments stay behind."""
    text = (Path(__file__).parent / "sql" / f"{name}.sql").read_text(encoding="utf-8")
    pieces = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:]
    statements = (re.sub(r"^--.*\n", "", piece, flags=re.MULTILINE).strip() for piece in pieces[1::2])
    return dict(zip(pieces[::2], statements, strict=True))
