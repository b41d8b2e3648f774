"""Every line that a run says of itself, each in one place; they are part of the interface.

Each says what happened, to what, and what to do. The prefix `batchguard: ` is added where it is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf

from batchguard.core.durations import format_duration
from batchguard.core.hold import Loss
from batchguard.core.holder import Holder, describe, on_hold
from batchguard.core.outcome import Ending, LostWhy
from batchguard.core.timing import Timing


@dataclass(frozen=True)
class Subject:
    """What a line is about: the key with its name, and the database with its server."""

    key: str
    database: str
    host: str

    @property
    def place(self) -> str:
        """The key and where it lives: a key excludes only within its database."""
        return f"{self.key} in {self.database}"


def lost(subject: Subject, ending: Ending, timing: Timing, sqlstate: str | None) -> str:
    """Say that the lock went and the command was killed for it."""
    killed = _killed(ending)
    match ending.lost_why:
        case LostWhy.SILENT:
            silence, host = format_duration(timing.check_timeout), subject.host.rpartition(":")[0] or subject.host
            return (
                f"lost {subject.place}: no answer for {silence}; {killed} before the server gives the lock up; "
                f"exit 76. Check the network to {host}."
            )
        case LostWhy.UNLOCKED:
            return (
                f"lost {subject.place}: the lock vanished while the session lived "
                f"(pg_advisory_unlock_all or DISCARD ALL?); {killed}, exit 76."
            )
        case LostWhy.NOT_PRIMARY:
            return f"lost {subject.place}: the server became a standby; {killed}, exit 76."
        case LostWhy.KEEPER_DIED:
            return (
                f"lost {subject.key}: our own keeper process died; {killed} before the lock went free, exit 76. "
                "Out of memory? See dmesg."
            )
        case LostWhy.GUARD_DIED:
            return f"guard process was killed; ended its command, then freed {subject.place}."
        case LostWhy.SUSPENDED:
            stopped = format_duration(ending.suspended_s or 0.0)
            return (
                f"lost {subject.key}: this machine or process was stopped for {stopped}, longer than the lock is safe; "
                f"{killed} on waking, exit 76."
            )
        case _:
            after = f" after {format_duration(ending.held_s)}" if ending.held_s is not None else ""
            half = " Its work may be half done." if _was_started(ending) else ""
            return (
                f"lost {subject.place}{after}: the server ended our session ({sqlstate or 'connection closed'}); "
                f"{killed}, exit 76.{half}"
            )


def _was_started(ending: Ending) -> bool:
    return ending.child is not None or ending.stop_took_s is not None


def _killed(ending: Ending) -> str:
    if not _was_started(ending):
        return "the command was not started"
    if ending.processes <= 1:
        return "killed the command"
    others = ending.processes - 1
    return f"killed the command and {others} process{'es' if others > 1 else ''}"


def lost_after_command(subject: Subject, exit_code: int, unsure_s: float) -> str:
    """Say that the lock was gone when it was to be given back."""
    return (
        f"{subject.place} was found lost only after the command had ended (exit {exit_code}): "
        f"another run may have overlapped its last {format_duration(unsure_s)}."
    )


def unlock_unanswered(subject: Subject, timing: Timing) -> str:
    """Say that the command is over but the server did not confirm the unlock."""
    return (
        f"{subject.place}: no answer to the unlock for {format_duration(timing.check_timeout)}; the server frees the "
        f"lock by itself within {format_duration(timing.ttl)}, until then the next run is skipped."
    )


def skipped(subject: Subject, holder: Holder | None, exit_code: int) -> str:
    """Say who holds the lock that a run was skipped for."""
    if holder is None:
        return f"skipped {subject.place}: it was held a moment ago; exit {exit_code}."
    if holder.by == "hold":
        return f"skipped {subject.place}: {on_hold(holder)}; exit {exit_code}."
    if holder.by == "other":
        return skipped_for_stranger(subject, holder)
    since = f" since {holder.since_clock}" if holder.since_clock else ""
    age = f"{format_duration(holder.held_s)}, " if holder.held_s is not None else ""
    return f"skipped {subject.place}: held by {holder.who}{since} ({age}{holder.backend}); exit {exit_code}."


def skipped_for_stranger(subject: Subject, holder: Holder) -> str:
    """Say that something which is not batchguard holds the lock."""
    age = f" for {format_duration(holder.held_s)}" if holder.held_s is not None else ""
    return (
        f"skipped {subject.place}: held{age} by {holder.who} (user {holder.user or 'unknown'}), "
        f"which is not batchguard. See: batchguard status --key {holder.key or subject.key.split()[0]}"
    )


def skipped_inside_itself(subject: Subject, run_id: str) -> str:
    """Say that a run of a key was started inside a run of the same key."""
    return (
        f"skipped {subject.key}: this run was started inside a run of the same key (run {run_id}), which holds it. "
        "Use the guard once."
    )


def over_max_runtime(subject: Subject, ending: Ending, limit_s: float, signal_name: str) -> str:
    """Say that a time limit ended the command."""
    signal_name = "KILL" if ending.needed_kill else signal_name
    return (
        f"killed {subject.key}'s command: over --max-runtime {format_duration(limit_s)}; "
        f"ended by {signal_name} after {format_duration(ending.stop_took_s or 0.0)}; exit 124."
    )


def spawn_failed(why: str, exit_code: int) -> str:
    """Say why the command could not be started; `why` names it."""
    return f"cannot run {why}; exit {exit_code}."


def guard_died_early(subject: Subject) -> str:
    """Say that the guard died before there was a command."""
    return f"guard process was killed before the command of {subject.key} was started; exit 76."


def unkillable(subject: Subject, pids: list[int]) -> str:
    """Name the processes that a KILL did not end."""
    listed = ", ".join(str(pid) for pid in pids)
    return (
        f"cannot kill process {listed} of {subject.key} (it became another user, or waits for a disk). The lock "
        "stays held until it is gone. See: ps -o pid,user,stat,wchan:20,args -p " + listed.replace(" ", "")
    )


def pooler_allowed() -> str:
    """Remind of what --allow-pooler cannot make sure."""
    return (
        "--allow-pooler: whether the pooler really gives each run a session of its own cannot be seen from here, "
        "and ttl is measured between the server and the pooler, not up to this host."
    )


def waiting(subject: Subject, holder: Holder, wait_s: float) -> str:
    """Say, to a person, what a wait is for."""
    limit = "" if wait_s == inf else f" for up to {format_duration(wait_s)}"
    return f"waiting{limit} for {subject.place}: held by {holder.who} ({holder.backend})"


def retrying(host: str, why: str, retry_s: float) -> str:
    """Say, to a person, that connecting goes on."""
    limit = "" if retry_s == inf else f" for {format_duration(retry_s)}"
    return f"cannot reach {host} yet ({why}); trying again{limit}"


def settling(subject: Subject, wait_s: float, reason: str) -> str:
    """Announce that the command starts later, and how to have it at once."""
    return (
        f"{subject.place} is ours; starting in {format_duration(wait_s)}, because {reason} and a run from before may "
        "still be dying. To start at once: --settle off"
    )


# Holds


def cannot_hold(subject: Subject, holder: Holder | None, waited_s: float) -> str:
    """Say who has the key that was to be held, and how to take over from them."""
    if holder is None:
        return f"cannot hold {subject.place}: it was held a moment ago; try again, exit 75."
    held = describe(holder) if holder.by == "hold" else f"held by {describe(holder)}"
    if waited_s >= 1:
        return f"cannot hold {subject.place}: still {held} after {format_duration(waited_s)} of waiting; exit 75."
    return f"cannot hold {subject.place}: {held}; exit 75. To take over when it ends: --wait 10m, or --wait forever"


def now_on_hold(subject: Subject, reason: str | None, end_at: datetime | None, pid: int, *, detached: bool) -> str:
    """Say that a hold has begun, what that means for runs, and how it ends."""
    until = f" until {end_at:%Y-%m-%d %H:%M:%S %Z}" if end_at else ""
    why = f': "{reason}"' if reason else ""
    sooner = " sooner" if end_at else ""
    end = f"kill {pid} on this host, or batchguard force-unlock" if detached else "Ctrl-C"
    return (
        f"{subject.place} is on hold{until}{why}. Runs that start meanwhile are skipped, not postponed. "
        f"To end it{sooner}: {end}"
    )


def hold_lost(subject: Subject, loss: Loss) -> str:
    """Say that a hold is lost for the moment, and since when."""
    return (
        f"lost the hold of {subject.place} at {loss.lost_at:%H:%M:%S}: {loss.why}. Runs may start until it is taken "
        "again, as soon as the server allows."
    )


def wait_interrupted(subject: Subject, sqlstate: str | None) -> str:
    """Say that the session of a wait was ended, and that the wait goes on."""
    return (
        f"the session that waits for {subject.place} was ended ({sqlstate or 'connection closed'}); waiting on. "
        "To end the wait: Ctrl-C"
    )


def hold_retry(subject: Subject, why: str) -> str:
    """Say why a hold is not taken again yet."""
    return f"cannot take the hold of {subject.place} again yet: {why}; trying again."


def hold_retaken(subject: Subject, loss: Loss, at: datetime) -> str:
    """Say between which moments runs may have started under a hold."""
    return (
        f"{subject.place} is on hold again since {at:%H:%M:%S}. It was lost at {loss.lost_at:%H:%M:%S} ({loss.why}): "
        "look whether a run started in between."
    )


def hold_released(subject: Subject, loss: Loss) -> str:
    """Say that somebody ended a hold: the session was ended while the server lived on."""
    return (
        f"the hold of {subject.place} was released by somebody at {loss.lost_at:%H:%M:%S}: its session was ended "
        f"({loss.sqlstate}) and the server did not restart; exit 76."
    )


def never_on_hold(subject: Subject) -> str:
    """Say that a hold's time was over before it began."""
    return f"{subject.place} was never on hold: the time was over before the key was free; exit 75."


def hold_ended_lost(subject: Subject, loss: Loss) -> str:
    """Say that a hold ended while it was lost."""
    return (
        f"the hold of {subject.place} ended, but was lost at {loss.lost_at:%H:%M:%S} ({loss.why}) and not taken again: "
        "look whether a run started since then; exit 76."
    )


def hold_ended(subject: Subject, held_s: float, *, was_held: bool) -> str:
    """Say that a hold is over."""
    if not was_held:
        return (
            f"the hold of {subject.place} ended after {format_duration(held_s)}, but the server did not confirm that "
            "it was held to the end: look whether a run started."
        )
    return f"{subject.place} is no longer on hold, after {format_duration(held_s)}."


# still-held


def outside_a_run(missing: Sequence[str]) -> str:
    """Say that still-held was called where no run has told what it holds."""
    return (
        f"still-held is for a batch that `batchguard run` has started; {', '.join(missing)} not set here. "
        "sudo and su drop them, unless told to keep them: sudo --preserve-env=…"
    )


def strange_environment(why: str) -> str:
    """Say that a variable does not read as a run wrote it."""
    return f"the BATCHGUARD_ variables are not as a run wrote them: {why}"


def cannot_tell(subject: Subject, why: str, exit_code: int) -> str:
    """Say that the question has no answer, and that this is no yes."""
    why = why.removesuffix(f" Exit {exit_code}.").removesuffix(f", exit {exit_code}.").removesuffix(".")
    return f"cannot tell whether {subject.key} is still held: {why}; exit {exit_code}. Stop, or ask again."


def cannot_see_session(pid: int) -> str:
    """Say that the role may not see whose session that is."""
    return (
        f"this role may not see when backend {pid} began: use the role of the run, or GRANT pg_read_all_stats (or "
        "pg_monitor)"
    )


def no_longer_held(subject: Subject, why: str) -> str:
    """Say that the run has lost its lock."""
    return f"{subject.place} is no longer held by this run: {why}. Stop: another run may have started; exit 76."


# force-unlock


def already_free(subject: Subject) -> str:
    """Say that there is nobody to end."""
    return f"{subject.place} is free; there is no session to end."


def holder_changed(subject: Subject, holder: Holder) -> str:
    """Say that what was looked at is no longer so."""
    return (
        f"{subject.place} is no longer held by the session that was shown ({holder.backend}): nobody was ended, "
        f"exit 75. Look again: batchguard status --key {holder.key}"
    )


def held_by_prepared(subject: Subject) -> str:
    """Say how a lock is freed that belongs to no session."""
    return (
        f"{subject.place} is held by a prepared transaction, which no session has: find it with SELECT gid, owner, "
        "prepared FROM pg_prepared_xacts, and end it with ROLLBACK PREPARED 'gid'. Nobody was ended, exit 78."
    )


def may_not_end(subject: Subject, holder: Holder, role: str, quoted_role: str, missing: Sequence[str]) -> str:
    """Say which rights a role needs to end a session; none would help against a superuser's."""
    if not missing:
        return (
            f"cannot free {subject.place}: {holder.backend} is a superuser's session, which only a superuser may end. "
            "Nobody was ended, exit 77."
        )
    return (
        f'cannot free {subject.place}: role "{role}" may not see or end sessions of user {holder.user}. '
        f"Ask a DBA: GRANT {', '.join(missing)} TO {quoted_role}; Nobody was ended, exit 77."
    )


def ended_session(subject: Subject, ended: Sequence[Holder], window_s: float) -> str:
    """Say whom we have ended, and for how long the key is kept from those who start next."""
    whom = ", ".join(f"{holder.who} ({holder.backend})" for holder in ended)
    if not window_s:
        return f"{subject.place} is free: ended {whom}."
    return (
        f"ended {whom}. Keeping {subject.place} for {format_duration(window_s)}, until what ran under it is surely "
        "dead; Ctrl-C gives it back at once."
    )


def taken_by_next(subject: Subject, holder: Holder) -> str:
    """Say that somebody who had been waiting has the key now."""
    return f"{subject.place} was freed, and is held by who waited for it: {describe(holder)}."


def not_ended(subject: Subject, holder: Holder, waited_s: float) -> str:
    """Say that a session does not end though it was told to."""
    return (
        f"{subject.place}: {holder.backend} was told to end and has not after {format_duration(waited_s)}; it may be "
        "waiting for a disk. It ends by itself when it can; look again: batchguard status. Exit 69."
    )


def not_kept(subject: Subject, ended: Sequence[Holder], why: str) -> str:
    """Say that our own session was lost before what ran under the key is surely dead."""
    whom = f"ended {', '.join(holder.who for holder in ended)}, but did" if ended else "did"
    return (
        f"{whom} not keep {subject.place} ({why}): a run may start beside a batch that is still dying, exit 69. "
        "Look: batchguard status"
    )


def kept_long_enough(subject: Subject) -> str:
    """Say that a freed key is free for everybody."""
    return f"{subject.place} is free."


def some_ids(ids: Sequence[int]) -> str:
    """Name jobs: all of a few, the first ones of many."""
    return ", ".join(str(id_) for id_ in ids[:5]) + (", …" if len(ids) > 5 else "")


def jobs_lost(ids: Sequence[int], of: int) -> str:
    """Say that jobs were not ours any more."""
    shown = some_ids(ids)
    which = f"job {shown}" if of == 1 else f"{len(ids)} of {of} jobs ({shown})"
    return (
        f"lost {which}: the lease expired and it was taken back or given to another, it was cancelled or ended "
        "otherwise, or the token is not of its claim; "
        f"exit 76. See: batchguard jobs show {ids[0]}"
    )


def unwritten(why: str | None, released: int, claimed: int) -> str:
    """Say that jobs could not be written, and are given back."""
    return f"cannot write the jobs ({why}): {released} of {claimed} released, exit 69."
