"""The end of a run, told to those who want to know: one line on stderr, the log file, the status file.

Keeper and guard both use this: whoever is left reports.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchguard.adapters import report
from batchguard.core import messages
from batchguard.core.guard import exit_code
from batchguard.core.holder import Holder, holder_json
from batchguard.core.messages import Subject
from batchguard.core.outcome import Ending, RunOutcome, outcome_of
from batchguard.core.settings import RunSettings, signal_name


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run besides how it ended; None where it did not get that far."""

    run_id: str
    subject: Subject
    keys: tuple[str, ...]
    started_at: str
    name: str | None = None
    slot: int | None = None
    database: str | None = None
    server: str | None = None
    host: str | None = None
    token: str | None = None
    waited_s: float | None = None
    settled_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Give the plain values that go through the pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "RunFacts":
        """Read what `to_json` gave."""
        return cls(**{**plain, "subject": Subject(**plain["subject"]), "keys": tuple(plain["keys"])})


def report_ending(
    facts: RunFacts,
    ending: Ending,
    settings: RunSettings,
    sqlstate: str | None = None,
    *,
    unlock_unanswered: bool = False,
) -> int:
    """Report a run whose lock was held, and give its exit code."""
    code = exit_code(ending)
    message = _line(facts.subject, ending, settings, sqlstate, code)
    if message is None and unlock_unanswered:
        message = messages.unlock_unanswered(facts.subject, settings.timing)
    if message is not None:
        report.say(message, settings.log_format, run_id=facts.run_id, key=facts.subject.key, exit_code=code)
    write_files(facts, settings, outcome_of(ending), code, ending=ending, message=message)
    return code


def _line(subject: Subject, ending: Ending, settings: RunSettings, sqlstate: str | None, code: int) -> str | None:
    """Choose the one line for an ending; None when all is well and there is nothing to say."""
    if ending.lost_why is not None:
        return messages.lost(subject, ending, settings.timing, sqlstate)
    if ending.max_runtime_over:
        return messages.over_max_runtime(subject, ending, settings.max_runtime, signal_name(settings.signal))
    if ending.spawn_failed is not None:
        return messages.spawn_failed(ending.spawn_error or "the command", ending.spawn_failed)
    if ending.lost_after_command:
        return messages.lost_after_command(subject, code, ending.unsure_s or 0.0)
    return None


def write_files(
    facts: RunFacts,
    settings: RunSettings,
    outcome: RunOutcome,
    code: int,
    *,
    ending: Ending | None = None,
    holder: Holder | None = None,
    message: str | None = None,
) -> None:
    """Append to the log file and replace the status file, where they were asked for; say it if one fails."""
    ending = ending or Ending()
    record = {
        "v": 1,
        "run_id": facts.run_id,
        "key": list(facts.keys),
        "name": facts.name,
        "slot": facts.slot,
        "database": facts.database,
        "server": facts.server,
        "host": facts.host,
        "started_at": facts.started_at,
        "ended_at": report.timestamp(),
        "outcome": outcome.value,
        "exit_code": code,
        "child_exit": ending.child.exit if ending.child else None,
        "child_signal": signal_name(ending.child.signal) if ending.child and ending.child.signal else None,
        "waited_s": _rounded(facts.waited_s),
        "settled_s": _rounded(facts.settled_s),
        "held_s": _rounded(ending.held_s),
        "lost_why": ending.lost_why.value if ending.lost_why else None,
        "lost_after_command": ending.lost_after_command,
        "holder": holder_json(holder, facts.database, facts.server, facts.name) if holder else None,
        "token": facts.token,
        "message": message,
    }
    status_wanted = settings.status_file is not None and (outcome is not RunOutcome.SKIPPED or settings.status_skips)
    failed = {}
    if settings.log_file is not None:
        failed[settings.log_file] = report.append_line(settings.log_file, record)
    if settings.status_file is not None and status_wanted:
        failed[settings.status_file] = report.replace_file(settings.status_file, record)
    for file, why in failed.items():
        if why is not None:
            report.say(
                f"cannot write {file}: {why}; the run itself is not affected.", settings.log_format, run_id=facts.run_id
            )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
