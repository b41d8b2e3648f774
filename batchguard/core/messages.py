"""Every line that a run says of itself, each in one place; they are part of the interface.

Each says what happened, to what, and what to do. The prefix `batchguard: ` is added where it is printed.
"""

from dataclasses import dataclass
from math import inf

from batchguard.core.durations import format_duration
from batchguard.core.holder import Holder, on_hold
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
    return f"cannot reach {host} yet ({why}); trying again for {format_duration(retry_s)}"


def settling(subject: Subject, wait_s: float, reason: str) -> str:
    """Announce that the command starts later, and how to have it at once."""
    return (
        f"{subject.place} is ours; starting in {format_duration(wait_s)}, because {reason} and a run from before may "
        "still be dying. To start at once: --settle off"
    )
