"""`batchguard run`: two processes nested in each other, see `runtime/keeper.py` and `runtime/guard.py`.

Both are subreapers, so whichever dies, the kernel hands everything below it to the other.
"""

import os
import signal
from typing import NoReturn

from batchguard.adapters import child, process_tree, report, signals
from batchguard.adapters.channel import Channel, CheckMark, open_pair
from batchguard.adapters.signals import CallerSignals
from batchguard.core import refusals
from batchguard.core.errors import ConfigError, SystemLimitError
from batchguard.core.exit_codes import ExitCode, exit_code_of_signal
from batchguard.core.settings import RunRequest
from batchguard.runtime.guard import run_guard


def run(request: RunRequest) -> int:
    """Run a command under a lock and give the exit code.

    Raises:
        BatchguardError: the command was not started, and why.
    """
    if not process_tree.is_visible():
        raise ConfigError(refusals.no_proc())
    try:
        child.reserve_standard_descriptors()
        caller = signals.take_over()
        process_tree.become_subreaper()
        keepers_end, guards_end = open_pair()
        mark = CheckMark()
        guard_pid = os.fork()  # before any thread exists, and before psycopg is loaded, which only the keeper needs
    except OSError as error:
        raise SystemLimitError(refusals.system_limit(request.key_text, error.errno, error.strerror)) from None
    if guard_pid == 0:
        keepers_end.close()
        _be_guard(request, guards_end, mark, caller)
    guards_end.close()
    from batchguard.runtime.keeper import run_keeper

    code = run_keeper(request, keepers_end, mark, caller, guard_pid)
    if code == exit_code_of_signal(signal.SIGINT) and child.owns_foreground():
        signals.die_of(signal.SIGINT)  # at a prompt: a shell ends its loop only when its child died of Ctrl-C
    return code


def _be_guard(request: RunRequest, channel: Channel, mark: CheckMark, caller: CallerSignals) -> NoReturn:
    """Be the guard, and leave without the caller's exit handlers; the keeper handles a guard that fails."""
    try:
        run_guard(request, channel, mark, caller)
    except BaseException as error:
        report.say(f"internal error in the guard: {type(error).__name__}: {error}. Please report it.")
        os._exit(ExitCode.SOFTWARE)
    os._exit(ExitCode.OK)
