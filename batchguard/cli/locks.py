"""`batchguard status`, `hold`, `still-held` and `force-unlock`: seeing and steering locks."""

import json
import os
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from batchguard.cli.options import (
    AllowPooler,
    Config,
    Dsn,
    KeyFromName,
    Keys,
    Local,
    Verbose,
    choose_dsn,
    load_config,
    read_option,
    say_config,
    searched_files,
    verify_key_name,
)
from batchguard.core.durations import parse_duration
from batchguard.core.errors import BatchguardError, UsageError
from batchguard.core.exit_codes import ExitCode
from batchguard.core.holder import Holder, describe, holder_json
from batchguard.core.keys import LockKey, keys_of
from batchguard.core.messages import Subject
from batchguard.core.number_table import Chosen, NumberTable
from batchguard.core.settings import RunSettings, read_setting

if TYPE_CHECKING:
    from batchguard.runtime.force_unlock import FreeRequest
    from batchguard.runtime.inspect import Observer, Seen

STATUS_EPILOG = """Examples:

\b
  batchguard status
  batchguard status --key daily_sales --watch 2s
  if batchguard status --key 100:1 --exit-code >/dev/null; then echo "100:1 is free"; fi
  batchguard status --json | python3 -m json.tool --json-lines

status takes no lock, and makes nobody skip. A role sees its own sessions; GRANT pg_monitor shows those of others.
PostgreSQL does not tell when a lock was taken: batchguard's own sessions say it; of others the end of the last
statement is shown, with "or before".

Exit codes: 0; with --exit-code 1 when a lock is held; 69 database unreachable; 77 login; 78 config, standby."""


def status(
    key: Keys = None,
    key_from_name: KeyFromName = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for each lock and waiter.")] = False,
    watch: Annotated[str | None, typer.Option("--watch", metavar="D", help="Look again every D, until Ctrl-C.")] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit 1 when a lock is held, else 0.")] = False,
    dsn: Dsn = None,
    config: Config = None,
    local: Local = False,
    verbose: Verbose = False,
) -> int:
    """Show the advisory locks of the database: who holds them, who waits, since when and why."""
    from batchguard.runtime.inspect import Observer

    pause_s = _pause(watch)
    verify_key_name(key_from_name)
    table = load_config(config)
    say_config(config, table, verbose)
    wanted = wanted_locks(table, config, key or ())
    observer = Observer(choose_dsn(dsn, local, table), "status")
    show = _Display(table, wanted, key_from_name, as_json=as_json)
    held = show.once(observer) if pause_s is None else show.again_and_again(observer, pause_s)
    return ExitCode.FINDINGS if exit_code and held else ExitCode.OK


def _pause(watch: str | None) -> float | None:
    if watch is None:
        return None
    pause_s = read_option("--watch", watch, parse_duration) or 0.0
    if not 0.1 <= pause_s < inf:
        raise UsageError("--watch: 0.1s is the shortest")
    return pause_s


def wanted_locks(table: NumberTable, config: str | None, keys: Sequence[str]) -> list[LockKey]:
    """Give the locks that `--key` names, which may be retired ones when they are only looked at."""
    from batchguard.core.number_table import find_keys

    return [lock for key in find_keys(table, keys, searched_files(config)) for lock in keys_of(key)]


class _Display:
    """Looks, and shows what there is in the form that was asked for."""

    def __init__(
        self, table: NumberTable, wanted: Sequence[LockKey], key_from_name: str | None, *, as_json: bool
    ) -> None:
        from batchguard.core.number_table import names_by_lock

        self.names = names_by_lock(table)
        self.wanted = wanted
        self.key_from_name = key_from_name
        self.as_json = as_json

    def look(self, observer: "Observer") -> "Seen":
        seen = observer.look(self.wanted, self.key_from_name)
        if self.key_from_name is not None and seen.hashed is not None:
            self.names[seen.hashed] = self.key_from_name
        return seen

    def once(self, observer: "Observer") -> bool:
        """Show the locks, and tell whether one is held."""
        from batchguard.cli.listing import print_listing

        seen = self.look(observer)
        if self.as_json:
            self.print_json(seen)
        else:
            print_listing(*self.listing(seen))
        return is_held(seen)

    def again_and_again(self, observer: "Observer", pause_s: float) -> bool:
        """Show them until Ctrl-C; a server that does not answer now may do so the next time."""
        import time

        from batchguard.cli.listing import is_terminal, plain, screen

        held = False
        try:
            with screen(wanted=is_terminal() and not self.as_json) as show:
                while True:
                    try:
                        seen = self.look(observer)
                        held = is_held(seen)
                        listing = self.listing(seen)
                    except BatchguardError as error:
                        seen, listing = None, (str(error), (), (), "")
                    if show is not None:
                        show(*listing)
                    elif not self.as_json:
                        typer.echo(plain(listing[0], listing[2], listing[3]))
                    elif seen is not None:
                        self.print_json(seen)
                    else:
                        typer.echo(f"batchguard: {listing[0]}", err=True)
                    time.sleep(pause_s)
        except KeyboardInterrupt:
            return held

    def listing(self, seen: "Seen") -> tuple[str, Sequence[str], Sequence[Sequence[str]], str]:
        """Give title, header, rows, and what stands where there is no row."""
        from batchguard.adapters.clock import wall_time

        rows = [
            (self.title(holder.key), _state(waits=holder.waits, shared=holder.shared), describe(holder))
            for holder in sorted(seen.holders, key=_place)
        ]
        shown = {holder.key for holder in seen.holders}
        asked = [*self.wanted, *([seen.hashed] if seen.hashed else [])]
        rows += [(self.title(lock), "free", "") for lock in asked if lock not in shown]
        title = f"advisory locks of {seen.place} at {wall_time():%Y-%m-%d %H:%M:%S}"
        return title, ("LOCK", "STATE", "BY"), rows, "none"

    def title(self, lock: LockKey | None) -> str:
        return " ".join(part for part in (str(lock), self.names.get(lock) if lock else None) if part)

    def print_json(self, seen: "Seen") -> None:
        lines = []
        for holder in sorted(seen.holders, key=_place):
            name = self.names.get(holder.key) if holder.key else None
            lines.append(json.dumps(holder_json(holder, seen.database, seen.server, name), ensure_ascii=False))
        if lines:
            typer.echo("\n".join(lines))


HOLD_EPILOG = """Examples:

\b
  batchguard hold --key daily_sales --until 06:00 --reason 'DB migration'
  batchguard hold --key 100:1 --wait forever --for 2h
  batchguard hold --all sales --wait 30m --detach --reason 'new release'

Runs that start while a key is on hold are skipped, not postponed. Of a range every slot is held. A hold that is lost
(restart, crash or failover of the server, a silent network) is taken again as soon as possible; both moments are said.
With --detach the pid goes to stdout, and what there is to say later to stderr where that is a file, else to the
system's log (journalctl -t batchguard). `batchguard status` shows who holds what, and why.

Exit codes: 0 ended by its time, by Ctrl-C or by TERM; 75 the key is busy; 76 released by somebody, or lost at the end;
64 usage; 69 database unreachable; 77 login or right missing; 78 config, key, pooler, standby."""


def hold(
    key: Keys = None,
    key_from_name: KeyFromName = None,
    category: Annotated[
        list[str] | None,
        typer.Option("--all", metavar="CATEGORY", help="Every listed key of a category, by its number or title."),
    ] = None,
    for_: Annotated[str | None, typer.Option("--for", metavar="D", help="End by itself after this long.")] = None,
    until: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="End by itself at 06:00, the next such local time, or '2026-12-01 06:00'."),
    ] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why; shown to those who are skipped.")] = None,
    wait: Annotated[
        str | None,
        typer.Option("-w", "--wait", metavar="D", help="Take over when the run ends, or 'forever'. [default: 0]"),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Come back once held; outlive this login.")] = False,
    allow_pooler: AllowPooler = None,
    dsn: Dsn = None,
    config: Config = None,
    local: Local = False,
    verbose: Verbose = False,
) -> int:
    """Keep batches from starting: take their keys until Ctrl-C, or until a time."""
    from batchguard.adapters.clock import wall_time
    from batchguard.core.hold import HoldRequest, parse_end, read_reason
    from batchguard.core.number_table import category_keys

    if for_ is not None and until is not None:
        raise UsageError("--for and --until both say when it ends; give one of them")
    if not key and key_from_name is None and not category:
        raise UsageError("which key? Give --key 100:1 or a name, or --all CATEGORY")
    verify_key_name(key_from_name)
    for_s = read_option("--for", for_, parse_duration)
    if for_s == 0:
        raise UsageError("--for 0 would end before it began")
    end_at = read_option("--until", until, lambda text: parse_end(text, wall_time()))
    wait_s = read_option("--wait", wait, lambda text: read_setting("wait", text))
    table = load_config(config)
    say_config(config, table, verbose)
    names = [*(key or ()), *(name for text in category or () for name in category_keys(table, text))]
    chosen, settings = choose_settings(table, config, names, allow_pooler)
    from batchguard.runtime.hold import hold as hold_keys

    request = HoldRequest(
        settings=settings,
        keys=chosen.keys,
        key_text=" ".join(part for part in (chosen.text, key_from_name) if part),
        key_from_name=key_from_name,
        dsn=choose_dsn(dsn, local, table),
        reason=read_option("--reason", reason, read_reason),
        for_s=for_s,
        end_at=end_at,
        wait_s=wait_s or 0.0,
        detach=detach,
        verbose=verbose,
    )
    return hold_keys(request)


STILL_HELD_EPILOG = """Examples, inside a batch that `batchguard run` has started:

\b
  for day in $days; do
    batchguard still-held || exit
    load "$day"
  done

Which lock it is about, and where to ask, is known from the BATCHGUARD_ variables that the run has set; --dsn and
the like only lend it a password. Stop on any code but 0: what cannot be told is no yes. It costs the start of a
Python; a program with a database connection of its own asks by SQL.

Exit codes: 0 yes; 76 no, another run may have started; 69 cannot tell; 64 not inside a run; 77 login or right missing;
78 config."""


def still_held(
    check_timeout: Annotated[
        str | None,
        typer.Option(metavar="D", help="How long to try for an answer. [default: as for the run's key, else 20s]"),
    ] = None,
    dsn: Dsn = None,
    config: Config = None,
    local: Local = False,
    verbose: Verbose = False,
) -> int:
    """Ask, inside a batch, whether its run still holds the lock."""
    from batchguard.adapters import report
    from batchguard.core.number_table import settings_of_others
    from batchguard.runtime.still_held import read_environment
    from batchguard.runtime.still_held import still_held as ask

    patience = read_option("--check-timeout", check_timeout, parse_duration)
    own = read_environment(os.environ)
    table = load_config(config)
    say_config(config, table, verbose)
    if patience is None:
        listed = settings_of_others(table, own.keys) or [table.defaults]
        patience = RunSettings(**listed[0]).check_timeout
    why = ask(own, choose_dsn(dsn, local, table), patience)
    if why is None:
        if verbose:
            report.say(f"{' '.join(map(str, own.keys))} is still held")
        return ExitCode.OK
    report.say(why)
    return ExitCode.LOST


FORCE_UNLOCK_EPILOG = """Examples:

\b
  batchguard force-unlock --key daily_sales
  batchguard force-unlock --key 100:1 --yes

For a holder that cannot be reached any other way: a hung session of a foreign program, a hold left open, a host that is
gone. A run whose session is ended loses its lock, and kills its batch. Therefore the key is kept for as long as that
may take, before the next run may have it; --now does not wait. Other roles' sessions need GRANT pg_signal_backend,
pg_read_all_stats; a superuser's only a superuser ends.

Exit codes: 0 free, or held by who waited; 64 usage, or no --yes; 69 database unreachable, or the session does not end;
75 nobody was ended, since you said no, or the holder is another one than was shown; 77 right missing; 78 config, a
prepared transaction."""


def force_unlock(
    key: Keys = None,
    key_from_name: KeyFromName = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    at_once: Annotated[bool, typer.Option("--now", help="Do not keep the key until the old batch is dead.")] = False,
    allow_pooler: AllowPooler = None,
    dsn: Dsn = None,
    config: Config = None,
    local: Local = False,
    verbose: Verbose = False,
) -> int:
    """End the session that holds a key, after showing whose it is."""
    from batchguard.core.number_table import settings_of_others
    from batchguard.core.settings import timing_of_table
    from batchguard.runtime.force_unlock import FreeRequest
    from batchguard.runtime.inspect import Observer

    if not key and key_from_name is None:
        raise UsageError("which key? Give --key 100:1 or a name")
    verify_key_name(key_from_name)
    table = load_config(config)
    say_config(config, table, verbose)
    wanted = wanted_locks(table, config, key or ())
    where = choose_dsn(dsn, local, table)
    observer = Observer(where, "force-unlock")
    seen = observer.look(wanted, key_from_name)
    names = _Display(table, wanted, key_from_name, as_json=False)
    code: int = ExitCode.OK
    for lock in [*wanted, *([seen.hashed] if seen.hashed else [])]:
        listed = settings_of_others(table, [lock]) or [table.defaults]
        given = {} if allow_pooler is None else {"allow_pooler": allow_pooler}
        request = FreeRequest(
            lock=lock,
            key_text=names.title(lock),
            dsn=where,
            settings=RunSettings(**{**listed[0], **given}),
            holders=tuple(holder for holder in observer.look([lock]).holders if not holder.waits),
            others_window=max(timing_of_table(settings).window for settings in listed),
            at_once=at_once,
        )
        code = _free(request, observer, Subject(names.title(lock), seen.place, seen.server), yes=yes) or code
    return code


def _free(request: "FreeRequest", observer: "Observer", subject: Subject, *, yes: bool) -> int:
    """Show whose session holds a key, ask, and end it."""
    from batchguard.adapters import report
    from batchguard.core import messages
    from batchguard.runtime.force_unlock import force_unlock as end_holders
    from batchguard.runtime.force_unlock import verify_rights

    if not request.holders:
        report.say(messages.already_free(subject))
        return ExitCode.OK
    for holder in request.holders:
        report.say(f"{subject.place}: {describe(holder)}")
    verify_rights(observer, subject, request.holders)
    if not yes:
        if not os.isatty(0):
            raise UsageError("force-unlock ends a session of somebody else's; without a terminal to ask, say --yes")
        many = f"these {len(request.holders)} sessions" if len(request.holders) > 1 else "this session"
        observer.close()  # somebody may think for long; a session that idles may be ended meanwhile
        if not typer.confirm(f"End {many}? A batch that runs under it is killed.", err=True):
            report.say("nobody was ended, exit 75.")
            return ExitCode.SKIPPED
    return end_holders(request, observer)


def choose_settings(
    table: NumberTable, config: str | None, names: Sequence[str], allow_pooler: bool | None
) -> tuple[Chosen, RunSettings]:
    """Give the keys and what the number table sets for them.

    Raises:
        ConfigError: no such key or name, or one that may not be used.
    """
    from batchguard.core.number_table import choose_keys
    from batchguard.core.settings import build_settings

    chosen = choose_keys(table, names, searched_files(config), must_agree=False)
    given = {} if allow_pooler is None else {"allow_pooler": allow_pooler}
    return chosen, build_settings(given, chosen.settings)


def is_held(seen: "Seen") -> bool:
    """Tell whether somebody holds one of the locks; to wait for one is not to hold it."""
    return any(not holder.waits for holder in seen.holders)


def _place(holder: Holder) -> tuple[int, tuple[int, ...], bool]:
    """Sort pairs before bigints, each by number, holders before waiters; who came first stays first."""
    key = holder.key
    return (0 if key and key.kind == "pair" else 1, key.numbers if key else (), holder.waits)


def _state(*, waits: bool, shared: bool) -> str:
    return ("waiting" if waits else "held") + (", shared" if shared else "")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(epilog=STATUS_EPILOG)(status)
    app.command(epilog=HOLD_EPILOG)(hold)
    app.command(epilog=STILL_HELD_EPILOG)(still_held)
    app.command(epilog=FORCE_UNLOCK_EPILOG)(force_unlock)
