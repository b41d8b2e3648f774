"""Hosts that start the same keys all the time, and somebody who breaks everything that may break.

Run as a program, as root, it is the long test:

    python -m tests.faults.nemesis --settle auto --seed 1 --starts 1000

It keeps to what is promised: one process fault per host at a time, any network, any server event.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

import psycopg

from batchguard.adapters import process_tree
from batchguard.core.timing import KILL_TAKES_EFFECT, Timing
from tests.fixtures.batch import boot_time, command, read_life
from tests.fixtures.guard import clean_environment
from tests.fixtures.hosts import Host, Network, build_network
from tests.fixtures.server import Workshop
from tests.fixtures.waiting import until
from tests.fixtures.watch import alive

TIMING = Timing(check_interval=0.2, check_timeout=0.5, kill_after=0.3, ttl=7)
HOSTS = 3
KEYS = 4
START_EVERY = 0.25
"""Seconds between two starts on one host, on average."""
FAULT_EVERY = 0.6
"""Seconds between two deeds of the nemesis, on average."""
RESET_LASTS = 0.3
"""Seconds for which a connection is answered with resets on one side, and the other side sees silence."""
EXPECTED_CODES = {0, 69, 75, 76, 143, -signal.SIGKILL}


@dataclass(frozen=True)
class Start:
    """One batchguard under way; `keeper` is its outer process."""

    number: int
    host: int
    keeper: int


@dataclass
class Deed:
    """Something the nemesis did to a host, or to the server, and until when it lasted."""

    kind: str
    host: int | None
    begun: float
    ended: float = inf
    key: int | None = None
    left: tuple[int, ...] = ()  # processes whose end is the end of the deed

    def touches(self, since: float, until: float) -> bool:
        """Tell whether it lasted into that time."""
        return self.begun <= until and self.ended >= since


@dataclass
class Batch:
    """A batch as its file tells it."""

    number: int
    host: int
    key: int
    began: float
    last: float


@dataclass(frozen=True)
class Overlap:
    """Two batches alive at once for so many seconds, and how many are explained by what had been done."""

    first: Batch
    second: Batch
    length: float
    allowed: float
    deeds: tuple[Deed, ...] = ()  # that were done to the first one's host, or to all, while it lived


@dataclass
class Outcome:
    """What came of it all."""

    settle: str
    seed: int
    starts: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    overlaps: list[Overlap] = field(default_factory=list)
    runs_afterwards: bool = False

    @property
    def longest(self) -> float:
        """The longest overlap in seconds; 0 when there was none."""
        return max((overlap.length for overlap in self.overlaps), default=0.0)

    @property
    def unexplained(self) -> list[Overlap]:
        """Those that are longer than anything that was done allows."""
        return [overlap for overlap in self.overlaps if overlap.length > overlap.allowed]

    def __str__(self) -> str:
        codes = ", ".join(f"{code}: {number}" for code, number in sorted(self.codes.items()))
        deeds = ", ".join(f"{kind}: {number}" for kind, number in sorted(self.deeds.items()))
        return (
            f"settle {self.settle}, seed {self.seed}: {self.starts} starts ({codes}), {self.batches} batches, "
            f"{len(self.overlaps)} overlaps, the longest {self.longest:.2f} s, {len(self.unexplained)} unexplained; {deeds}"
        )


class Nemesis:
    """One storm: `starts` starts, spread over all hosts."""

    def __init__(self, workshop: Workshop, settle: str, seed: int, starts: int) -> None:
        self.random = random.Random(seed)
        self.outcome = Outcome(settle, seed)
        self.wanted = starts
        self.network: Network = build_network(workshop, HOSTS, max_connections="200")
        self.folder = workshop.folder / f"batches-{settle}-{seed}"
        self.folder.mkdir()
        self.folder.chmod(0o777)
        self.network.server.sql("CREATE ROLE plain LOGIN")
        self.agents = [self._agent(host) for host in self.network.hosts]
        self.runs: dict[int, Start] = {}
        self.places: list[tuple[int, int]] = []  # of each start, the host and the key
        self.deeds: list[Deed] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.faulty: dict[int, Deed] = {}
        self.cut: dict[int, Deed] = {}
        self.restarting: threading.Thread | None = None

    def _agent(self, host: Host) -> subprocess.Popen[bytes]:
        errors = (self.folder / f"stderr-{host.namespace}").open("wb")
        with host.inside(), errors:
            agent = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.host_agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=clean_environment(),
            )
        assert agent.stdout is not None
        os.set_blocking(agent.stdout.fileno(), False)
        return agent

    def run(self) -> Outcome:
        """Let it rage, heal everything, and look at what the batches wrote."""
        self._grow_older_than_a_first_start()
        next_start = [boot_time() + START_EVERY * host / HOSTS for host in range(HOSTS)]
        next_deed = boot_time() + 1
        while self.outcome.starts < self.wanted:
            self._listen()
            self._do_what_is_due()
            for host in range(HOSTS):
                if boot_time() >= next_start[host]:
                    next_start[host] = boot_time() + START_EVERY * self.random.uniform(0.5, 1.5)
                    self._start(host)
            if boot_time() >= next_deed:
                next_deed = boot_time() + FAULT_EVERY * self.random.uniform(0.3, 1.7)
                self._break_something()
            time.sleep(0.005)
        self._calm_down()
        self._judge()
        return self.outcome

    def _grow_older_than_a_first_start(self) -> None:
        """A cluster's first start is not settled for; what comes here is to be told from it."""
        query = "SELECT extract(epoch FROM clock_timestamp()) - (system_identifier >> 32) > 6 FROM pg_control_system()"
        until(lambda: self.network.server.sql(query) == [(True,)])

    # Starting and hearing of ends

    def _start(self, host: int) -> None:
        number = self.outcome.starts
        self.outcome.starts += 1
        key = self.random.randrange(KEYS)
        self.places.append((host, key))
        options = [option for option in ("--stubborn", "--child") if self.random.random() < 0.5]
        batch = command(self._file(number), self.random.uniform(0.2, 3), *options)
        wait = ["--wait", "3"] if self.random.random() < 0.2 else []
        user = self.random.choice(["postgres", "plain"])
        timing = [
            *("--check-interval", f"{TIMING.check_interval}", "--check-timeout", f"{TIMING.check_timeout}"),
            *("--kill-after", f"{TIMING.kill_after}", "--ttl", f"{TIMING.ttl}", "--connect-timeout", "2"),
        ]
        dsn = f"{self.network.hosts[host].dsn} user={user}"
        what = ["--dsn", dsn, "--key", f"100:{key}", "--settle", self.outcome.settle]
        argv = ["run", *timing, *what, *wait, "--wait-descendants", "all", "--", *batch]
        stdin = self.agents[host].stdin
        assert stdin is not None
        stdin.write(json.dumps([number, argv]).encode() + b"\n")
        stdin.flush()

    def _file(self, number: int) -> Path:
        return self.folder / f"batch-{number}"

    def _listen(self) -> None:
        for host, agent in enumerate(self.agents):
            assert agent.stdout is not None
            for line in agent.stdout.readlines():
                number, pid, code = json.loads(line)
                if code is None:
                    self.runs[number] = Start(number, host, pid)
                else:
                    del self.runs[number]
                    self.outcome.codes[code] += 1

    # Breaking things

    def _do_what_is_due(self) -> None:
        due = [deed for deed in self.later if deed[0] <= boot_time()]
        self.later = [deed for deed in self.later if deed not in due]
        for _, undo in due:
            undo()
        for host, deed in list(self.faulty.items()):
            if deed.kind.endswith("killed") and not alive(deed.left):
                self._forget_fault(host)

    def _break_something(self) -> None:
        deeds: list[tuple[int, Callable[[], None]]] = [
            (4, self._terminate_backend),
            (1, self._restart),
            (1, self._crash),
            (4, self._cut_a_cable),
            (3, self._reset_one_side),
            (6, self._hurt_a_process),
        ]
        if not self._is_a_batch_running() and self.random.random() < 0.8:
            return  # most of it would only keep batches from starting at all
        weights = [weight for weight, _ in deeds]
        self.random.choices([deed for _, deed in deeds], weights)[0]()

    def _is_a_batch_running(self) -> bool:
        return any(self._has_command(run) for run in self.runs.values())

    def _has_command(self, run: Start) -> bool:
        return any(process_tree.children(guard) for guard in process_tree.children(run.keeper))

    def _note(self, kind: str, host: int | None = None, **more: Any) -> Deed:
        self.outcome.deeds[kind] += 1
        self.deeds.append(Deed(kind, host, **{"begun": boot_time(), **more}))
        return self.deeds[-1]

    def _terminate_backend(self) -> None:
        query = "SELECT objid::int, pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        begun = boot_time()
        try:
            ended = self.network.server.sql(query + self.random.choice([" LIMIT 1", ""]))
        except psycopg.OperationalError:
            return  # it is restarting
        for key, _ in ended:
            self._note("backend terminated", begun=begun, ended=begun, key=key)

    def _restart(self) -> None:
        if self.restarting is not None and self.restarting.is_alive():
            return
        mode = self.random.choice(["fast", "immediate"])
        self._note(f"server restarted, {mode}")
        self.restarting = threading.Thread(target=self.network.restart, args=[mode])
        self.restarting.start()

    def _crash(self) -> None:
        if self.restarting is not None and self.restarting.is_alive():
            return
        try:
            [(pid,)] = self.network.server.sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
        except (psycopg.OperationalError, ValueError):
            return  # it is recovering
        self._note("server crashed")
        os.kill(pid, signal.SIGKILL)

    def _cut_a_cable(self) -> None:
        host = self.random.randrange(HOSTS)
        if host in self.cut:
            return
        cable = self.network.hosts[host]
        kinds: dict[str, Callable[[], None]] = {
            "packets lost both ways": lambda: cable.drop("to", "from"),
            "packets to the server lost": lambda: cable.drop("to"),
            "packets from the server lost": lambda: cable.drop("from"),
            "cable pulled": cable.pull_cable,
        }
        kind = self.random.choice(list(kinds))
        seconds = self.random.choice([0.2, 0.6, 2, 5, 12]) * self.random.uniform(0.5, 1.5)
        self._cut(host, kind, kinds[kind], seconds)

    def _reset_one_side(self) -> None:
        host = self.random.randrange(HOSTS)
        if host in self.cut:
            return
        kind = self.random.choice(["server", "client"])
        reset = {"server": self.network.hosts[host].reset_server, "client": self.network.hosts[host].reset_client}[kind]
        self._cut(host, f"{kind} reset", reset, RESET_LASTS)

    def _cut(self, host: int, kind: str, act: Callable[[], None], seconds: float) -> None:
        deed = self.cut[host] = self._note(kind, host)
        act()

        def heal() -> None:
            self.network.hosts[host].heal()
            deed.ended = boot_time()
            del self.cut[host]

        self.later.append((boot_time() + seconds, heal))

    def _hurt_a_process(self) -> None:
        """Kill or stop the guard or the keeper of a run, on a host where every process is sound."""
        victims = []
        for run in self.runs.values():
            guards = process_tree.children(run.keeper) if run.host not in self.faulty else []
            weight = 20 if self._has_command(run) else 1
            victims += [(run, guard) for guard in guards[:1]] * weight
        if not victims:
            return
        run, guard = self.random.choice(victims)
        who, pid = self.random.choice([("keeper", run.keeper), ("guard", guard)])
        if self.random.random() < 0.5:
            process_tree.send(pid, signal.SIGKILL)
            self.faulty[run.host] = self._note(f"{who} killed", run.host)
            self.faulty[run.host].left = (run.keeper, guard)
        else:
            process_tree.send(pid, signal.SIGSTOP)
            self.faulty[run.host] = self._note(f"{who} stopped", run.host)
            seconds = self.random.choice([0.3, 1, 3, 8]) * self.random.uniform(0.5, 1.5)

            def go_on() -> None:
                process_tree.send(pid, signal.SIGCONT)
                self._forget_fault(run.host)

            self.later.append((boot_time() + seconds, go_on))

    def _forget_fault(self, host: int) -> None:
        self.faulty.pop(host).ended = boot_time()

    # The end

    def _calm_down(self) -> None:
        """Undo everything, wait for every run, and see whether one gets through again.

        A host that was cut off may have left a session which the server keeps for its ttl.
        """
        for _, undo in self.later:
            undo()
        if self.restarting is not None:
            self.restarting.join()
        self._wait_for_all()
        deadline = boot_time() + 2 * TIMING.ttl + TIMING.window
        while not self.outcome.runs_afterwards and boot_time() < deadline:
            self._start(0)
            self._wait_for_all()
            self.outcome.runs_afterwards = read_life(self._file(self.outcome.starts - 1)).began < inf
        for agent in self.agents:
            assert agent.stdin is not None
            assert agent.stdout is not None
            agent.stdin.close()
            agent.wait()
            agent.stdout.close()
        until(lambda: not self.network.server.locks() and not self.network.server.sessions(), within=20)

    def leave(self) -> None:
        """End the server; the janitor removes the rest."""
        self.network.server.stop("immediate")

    def _wait_for_all(self) -> None:
        def is_over() -> bool:
            self._listen()
            return self.outcome.codes.total() == self.outcome.starts

        until(is_over, within=60)

    def _judge(self) -> None:
        batches = []
        for number, (host, key) in enumerate(self.places):
            life = read_life(self._file(number))
            if life.began < inf:
                batches.append(Batch(number, host, key, life.began, life.last))
        self.outcome.batches = len(batches)
        for first, second, length in find_overlaps(batches):
            may = allowed(self.outcome.settle, self.deeds, first, second)
            near = [deed for deed in self.deeds if deed.host in (None, first.host)]
            near = [deed for deed in near if deed.touches(first.began - TIMING.window, second.began)]
            self.outcome.overlaps.append(Overlap(first, second, length, may, tuple(near)))


FREES_ONE_LOCK = ("backend terminated", "server reset")
"""What frees a lock at once without a trace that another run could see."""
ABOUT_TO_START = 0.5
"""Seconds from the last look at a lock to the begin of the command, on a busy machine: what frees the lock in between
is heard when the command runs already."""
FREES_ALL_LOCKS = ("server restarted, fast", "server restarted, immediate", "server crashed")


def allowed(settle: str, deeds: list[Deed], first: Batch, second: Batch) -> float:
    """Give for how many seconds two batches may overlap after what was done: see docs/safety.md.

    Only a lock that was freed at once, while the first held it and not longer ago than its tree can
    live, explains an overlap at all.
    """
    since = max(first.began - ABOUT_TO_START, second.began - TIMING.window)
    kinds = FREES_ONE_LOCK if settle == "auto" else (*FREES_ONE_LOCK, *FREES_ALL_LOCKS)
    freeing = [
        deed
        for deed in deeds
        if deed.kind in kinds
        and since <= deed.begun <= second.began
        and deed.key in (None, first.key)
        and deed.host in (None, first.host)
    ]
    if settle == "always" or not freeing:
        return 0.0
    freed = min(deed.begun for deed in freeing)
    others = [deed for deed in deeds if deed.host == first.host and deed not in freeing]
    if settle == "off" or any(deed.touches(freed, first.last) for deed in others):
        return TIMING.window
    until_heard = TIMING.check_interval + RESET_LASTS if any(deed.kind == "server reset" for deed in freeing) else 0.0
    return until_heard + TIMING.kill_after + KILL_TAKES_EFFECT


def find_overlaps(batches: list[Batch]) -> list[tuple[Batch, Batch, float]]:
    """Give every two batches of one key that were alive at once, the earlier first, and for how many seconds."""
    ordered = sorted(batches, key=lambda batch: batch.began)
    return [
        (first, second, min(first.last, second.last) - second.began)
        for first, second in combinations(ordered, 2)
        if second.key == first.key and second.began <= first.last
    ]


def main() -> int:
    """Run one storm from the command line; 1 when an overlap is not explained or nothing runs afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settle", choices=["auto", "always", "off"], default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--starts", type=int, default=1000)
    arguments = parser.parse_args()
    process_tree.become_subreaper()
    workshop = Workshop()
    try:
        outcome = Nemesis(workshop, arguments.settle, arguments.seed, arguments.starts).run()
    finally:
        workshop.janitor.finish()
    sys.stdout.write(f"{outcome}\n")
    for overlap in outcome.overlaps:
        sys.stdout.write(f"{overlap}\n")
    unexpected = set(outcome.codes) - EXPECTED_CODES
    if unexpected:
        sys.stdout.write(f"exit codes that should not be: {unexpected}\n")
    return int(bool(outcome.unexplained or unexpected or not outcome.runs_afterwards))


if __name__ == "__main__":
    sys.exit(main())
