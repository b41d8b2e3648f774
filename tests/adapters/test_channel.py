"""The channel between keeper and guard."""

import os
import socket

from batchguard.adapters.channel import CheckMark, open_pair, shut_down


def test_messages_keep_their_bounds_and_order() -> None:
    """What is sent arrives whole and in order; nothing to read is no error."""
    one, other = open_pair()
    assert other.receive() == []
    one.send("a", {"x": 1.5})
    one.send("b")
    assert [(message.kind, message.values) for message in other.receive()] == [("a", {"x": 1.5}), ("b", {})]
    assert other.is_open
    one.close()
    assert other.receive() == []
    assert not other.is_open
    other.close()


def test_descriptors_come_along_closed_on_exec() -> None:
    """A descriptor that is passed is a duplicate, and not inherited by what is started next."""
    one, other = open_pair()
    read_end, write_end = os.pipe()
    one.send("held", fds=[write_end])
    os.close(write_end)
    [message] = other.receive()
    [fd] = message.fds
    assert not os.get_inheritable(fd)
    os.write(fd, b"x")
    assert os.read(read_end, 1) == b"x"
    for end in (fd, read_end):
        os.close(end)
    one.close()
    other.close()


def test_send_never_blocks() -> None:
    """A peer that has stopped reading, or is gone, does not stop the sender."""
    one, other = open_pair()
    for _ in range(5000):
        one.send("signal", {"number": 15})
    other.close()
    one.send("signal", {"number": 15})
    one.close()


def test_last_words_are_heard() -> None:
    """What a peer said before it left arrives, also when it left without reading what we said."""
    one, other = open_pair()
    one.send("unread")
    other.send("last words")
    other.close()
    assert [message.kind for message in one.receive()] == ["last words"]
    assert not one.is_open
    one.close()


def test_check_mark_is_shared_with_a_fork() -> None:
    """What one process writes, the other reads, to the nanosecond."""
    mark = CheckMark()
    assert mark.read() == 0
    pid = os.fork()
    if pid == 0:
        mark.write(123456.789)
        os._exit(0)
    os.waitpid(pid, 0)
    assert mark.read() == 123456.789


def test_shut_down_ends_the_connection_for_every_duplicate() -> None:
    """The peer sees the end although somebody else still has the socket open."""
    one, other = socket.socketpair()
    shut_down(os.dup(one.fileno()))
    assert other.recv(1) == b""
    one.close()
    other.close()
