"""How a run went: what the guard tells the keeper, and what the log and status files say of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from batchguard.core.exit_codes import exit_code_of_signal


class LostWhy(Enum):
    """Why a lock no longer counts as held."""

    SESSION_ENDED = "session_ended"
    SILENT = "silent"
    UNLOCKED = "unlocked"
    NOT_PRIMARY = "not_primary"
    KEEPER_DIED = "keeper_died"
    GUARD_DIED = "guard_died"
    SUSPENDED = "suspended"


class RunOutcome(Enum):
    """One word for how a run went."""

    DONE = "done"
    FAILED = "failed"
    SIGNALED = "signaled"
    SKIPPED = "skipped"
    LOST = "lost"
    MAX_RUNTIME = "max_runtime"
    INTERRUPTED = "interrupted"
    NOT_STARTED = "not_started"


@dataclass(frozen=True)
class ChildEnd:
    """How the command itself ended: with an exit code, or by a signal."""

    exit: int | None = None
    signal: int | None = None

    @property
    def exit_code(self) -> int:
        """What a shell would report."""
        if self.signal is not None:
            return exit_code_of_signal(self.signal)
        return self.exit or 0


@dataclass(frozen=True)
class Ending:
    """Everything about the end of a run that only the guard saw; durations in seconds."""

    child: ChildEnd | None = None
    lost_why: LostWhy | None = None
    held_s: float | None = None
    suspended_s: float | None = None
    max_runtime_over: bool = False
    interrupted_by: int | None = None
    spawn_failed: int | None = None
    spawn_error: str | None = None
    stop_took_s: float | None = None
    needed_kill: bool = False
    processes: int = 0
    lost_after_command: bool = False
    unsure_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Give the plain values that go through the pipe."""
        plain = asdict(self)
        plain["lost_why"] = self.lost_why.value if self.lost_why else None
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Ending":
        """Read what `to_json` gave."""
        values = dict(plain)
        values["child"] = ChildEnd(**values["child"]) if values["child"] else None
        values["lost_why"] = LostWhy(values["lost_why"]) if values["lost_why"] else None
        return cls(**values)


def outcome_of(ending: Ending) -> RunOutcome:
    """Put an ending into one word."""
    if ending.lost_why is not None:
        return RunOutcome.LOST
    if ending.max_runtime_over:
        return RunOutcome.MAX_RUNTIME
    if ending.spawn_failed is not None:
        return RunOutcome.NOT_STARTED
    if ending.child is None:
        return RunOutcome.INTERRUPTED
    if ending.child.signal is not None:
        return RunOutcome.SIGNALED
    return RunOutcome.FAILED if ending.child.exit else RunOutcome.DONE
