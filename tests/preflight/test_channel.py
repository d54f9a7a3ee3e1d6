"""Channels believe only those who have the run's secret, and probe servers only those who have the token."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from phalanx.base.errors import ConfigError, PeerLost
from phalanx.preflight.channel import Channel, ChannelLost, Handshake, Member, call, connect, handshake_with, listener
from phalanx.preflight.probe import TOKEN, ProbeServer, bytes_per_second, clock_offset, packet_arrives

SECRET = "the secret of a run, long enough"
PATIENCE_S = 120.0  # of tests that wait for a thread of this machine
NODE = Member(3, 0, "node-d", "10.0.0.4", "eth0")


class Coordinating:
    """A thread that accepts one connection; `then` is done with the channel at once."""

    def __init__(self, secret: str, then: Callable[[Channel], None] = lambda channel: None):
        self.listening = listener("127.0.0.1", 0)
        self.port: int = self.listening.getsockname()[1]
        self.found: list[Handshake] = []
        self._thread = threading.Thread(target=self._run, args=(secret, then), daemon=True)
        self._thread.start()

    def _run(self, secret: str, then: Callable[[Channel], None]) -> None:
        connection, _ = self.listening.accept()
        self.found.append(handshake_with(connection, secret))
        if self.found[0].channel is not None:
            then(self.found[0].channel)

    def end(self) -> Handshake:
        self._thread.join(PATIENCE_S)
        self.listening.close()
        return self.found[0]


def test_both_sides_have_the_secret():
    other = Coordinating(SECRET)
    mine = call("127.0.0.1", other.port, NODE, SECRET, PATIENCE_S)
    found = other.end()
    assert found.member == NODE and found.channel is not None
    for number in range(3):
        mine.send({"number": number})
        assert found.channel.receive(PATIENCE_S) == {"number": number}
        found.channel.send({"text": "é" * 100_000})
        assert mine.receive(PATIENCE_S) == {"text": "é" * 100_000}


def test_what_follows_the_handshake_at_once_is_not_lost():
    """It may arrive together with the last line of the handshake."""

    def slowly(self: Channel, until: float | None) -> bytes:
        time.sleep(0.2)
        return real(self, until)

    real = Channel._line
    other = Coordinating(SECRET, lambda channel: [channel.send({"order": n}) for n in range(3)])  # type: ignore[arg-type]
    Channel._line = slowly  # type: ignore[method-assign]
    try:
        mine = call("127.0.0.1", other.port, NODE, SECRET, PATIENCE_S)
    finally:
        Channel._line = real  # type: ignore[method-assign]
    assert [mine.receive(PATIENCE_S)["order"] for _ in range(3)] == [0, 1, 2]
    other.end()


@pytest.mark.parametrize("theirs, mine", [(SECRET, "of somebody else, as long as it"), (SECRET, ""), ("", SECRET)])
def test_another_secret_is_refused_and_not_shown(theirs, mine):
    other = Coordinating(theirs)
    with pytest.raises(ConfigError, match=r"PHALANX_RUN_SECRET='\(not shown\)'") as caught:
        call("127.0.0.1", other.port, NODE, mine, PATIENCE_S)
    found = other.end()
    assert found.channel is None and found.rank == 3 and "is not that of the first node" in found.why
    assert not any(secret in str(caught.value) for secret in (theirs, mine) if secret)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b'{"member": 3}\n', b"[" * 100_000 + b"\n"])
def test_a_stranger_is_turned_away(said):
    other = Coordinating(SECRET)
    with socket.create_connection(("127.0.0.1", other.port)) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        found = other.end()
    assert found.channel is None and found.rank == -1 and "did not introduce itself" in found.why


def pair(key: bytes | None) -> Iterator[Channel]:
    for coordinates, end in zip((True, False), socket.socketpair()):
        number = end.detach()
        yield Channel(number, number, key, coordinates)


def test_a_line_is_believed_once_in_its_place_and_from_its_side():
    one, two = pair(b"key")
    one.send({"n": 1})
    line = os.read(two._reads, 1 << 16)
    changed = line.replace(b'"n": 1', b'"n": 2')
    assert changed != line
    for sent in (changed, line + line):
        first, second = pair(b"key")
        os.write(first._writes, sent)
        with pytest.raises(ChannelLost, match="not signed by this run"):
            second.receive(PATIENCE_S)
            second.receive(PATIENCE_S)
    mirror, _ = pair(b"key")  # what a side said itself, sent back to it
    mirror._buffer = line
    with pytest.raises(ChannelLost, match="not signed by this run"):
        mirror.receive(PATIENCE_S)


def test_what_is_no_message():
    for text in (b"[1]\n", b"nothing\n", b"\xff\n"):
        one, two = pair(None)
        os.write(one._writes, text)
        with pytest.raises(ChannelLost, match="cannot be read"):
            two.receive(PATIENCE_S)
    one, two = pair(None)
    with pytest.raises(ChannelLost, match="does not answer"):
        two.receive(0.05)
    os.write(one._writes, b'Welcome\n{"a": 1}\n')
    assert [two.receive_any(PATIENCE_S), two.receive_any(PATIENCE_S)] == [{}, {"a": 1}]
    one.close()
    with pytest.raises(ChannelLost, match="ended"):
        two.receive(PATIENCE_S)


def test_where_nobody_listens():
    with socket.socket() as deaf:  # nobody else can take its port meanwhile
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        with pytest.raises(PeerLost, match=f"127.0.0.1:{port} within .* nothing listens there yet"):
            connect("127.0.0.1", port, refused_s=0.3, unreachable_s=PATIENCE_S)
        with pytest.raises(PeerLost, match="the name nobody.invalid does not resolve"):
            connect("nobody.invalid", port, refused_s=600, unreachable_s=0.3)


def test_probes_answer_those_who_have_the_token():
    token = os.urandom(TOKEN)
    with ProbeServer("127.0.0.1", token) as server:
        offset, half = clock_offset("127.0.0.1", server.port, token)
        assert abs(offset) <= half + 1e-3
        assert bytes_per_second("127.0.0.1", server.port, token, 0.05) > 0
        assert packet_arrives("127.0.0.1", server.port, token, 1500).arrived
        with pytest.raises(OSError):
            clock_offset("127.0.0.1", server.port, bytes(TOKEN))
        assert not packet_arrives("127.0.0.1", server.port, bytes(TOKEN), 1500).arrived
        assert packet_arrives("127.0.0.1", server.port, token, 65536).why == "larger than this node's own MTU"
    with pytest.raises(OSError):
        clock_offset("127.0.0.1", server.port, token)
