"""Between keeper and guard: a pipe for what happens once, and a shared word for the last good check.

The pipe is a pair of SOCK_SEQPACKET sockets: a message is whole or absent, and end of file says
that the other process is gone. The word is memory that both see: were the checks messages too, a
guard that somebody stops overnight would fill the pipe and wake up to stale news.
"""

import json
import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LARGEST = 65536
_MOST_FDS = 4


@dataclass(frozen=True)
class Message:
    """One message; `fds` are descriptors that came with it, close-on-exec."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    fds: tuple[int, ...] = ()


class Channel:
    """One end of the pipe."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self.is_open = True

    def fileno(self) -> int:
        """Give the descriptor that becomes readable with a message or the end."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def send(self, kind: str, values: Mapping[str, Any] | None = None, fds: Sequence[int] = ()) -> bool:
        """Send one message; never blocks. False, and dropped, when the peer is gone or has long stopped reading."""
        data = json.dumps([kind, values or {}]).encode()
        try:
            socket.send_fds(self._end, [data], list(fds))
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        """Give the messages that have come; afterwards `is_open` is False if the other end is gone."""
        messages = []
        while self.is_open:
            try:
                # MSG_CMSG_CLOEXEC: socket.recv_fds would leave the descriptors to whatever is started next.
                data, ancillary, _, _ = self._end.recvmsg(
                    _LARGEST, socket.CMSG_SPACE(_MOST_FDS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # the peer left with our messages unread; the kernel says so once, before it gives us its own
            if not data:
                self.is_open = False
                break
            kind, values = json.loads(data)
            messages.append(Message(kind, values, _descriptors(ancillary)))
        return messages


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, ...]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.extend(memoryview(data[: len(data) // 4 * 4]).cast("i"))
    return tuple(found)


def open_pair() -> tuple[Channel, Channel]:
    """Make the two ends; each process closes the other's, or end of file never comes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), Channel(theirs)


class CheckMark:
    """The moment of the last good check, in memory that both processes see; made before the fork."""

    def __init__(self) -> None:
        # One aligned 8-byte store and load: a reader sees the old moment or the new one, never half of each.
        self._nanoseconds = memoryview(mmap.mmap(-1, 8)).cast("q")

    def write(self, checked_at: float) -> None:
        """Publish a moment, in seconds of CLOCK_BOOTTIME."""
        self._nanoseconds[0] = round(checked_at * 1e9)

    def read(self) -> float:
        """Give the moment last published, in seconds; 0 before the first."""
        return self._nanoseconds[0] / 1e9


def duplicate(fd: int) -> int:
    """Duplicate a descriptor, close-on-exec."""
    return os.dup(fd)


def shut_down(fd: int) -> None:
    """End the connection behind a descriptor, whoever else has a duplicate of it, and close ours."""
    end = socket.socket(fileno=fd)
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side has ended it already
    finally:
        end.close()
