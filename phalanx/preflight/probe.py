"""The probe server of a node, and its clients on other nodes: whether it can be reached, its clock, how many bytes per
second arrive, and how large a packet may be.

A server answers only clients that begin with the preflight's token. It listens at the address that training will use.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import socket
import struct
import threading
import time

from phalanx.base.dataclass import dataclass

TOKEN = 16  # bytes
CONNECT_S = 3.0
DATAGRAM_S = 0.4
TRIES = 4
CLOCKS = 6  # readings; that with the shortest way counts
CHUNK = 1 << 16
SOCKET_BUFFER = 1 << 18  # bytes under way and not counted yet when a measurement ends
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3  # Linux: set "do not fragment", and send whatever the size
IPV6_MTU_DISCOVER, IPV6_DONTFRAG = 23, 62
HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}  # of IP and UDP
CLOCK = struct.Struct("!d")
COUNT = struct.Struct("!Q")


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class ProbeServer:
    """Serves probes at `address` and a free port, in threads, inside the context."""

    def __init__(self, address: str, token: bytes):
        self._token = token
        self._tcp = socket.create_server((address, 0), family=family_of(address), backlog=512)
        self.port: int = self._tcp.getsockname()[1]
        self._udp = socket.socket(family_of(address), socket.SOCK_DGRAM)
        self._udp.bind((address, self.port))
        self._over = False

    def __enter__(self) -> ProbeServer:
        for serve in (self._accept, self._datagrams):
            threading.Thread(target=serve, daemon=True, name="phalanx-probe").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for opened in (self._tcp, self._udp):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
            opened.close()

    def _accept(self) -> None:
        while not self._over:
            try:
                peer, _ = self._tcp.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True, name="phalanx-probe").start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.settimeout(4 * CONNECT_S)
            head = _exactly(peer, TOKEN + 1)
            if not hmac.compare_digest(head[:TOKEN], self._token):
                return
            if head[TOKEN:] == b"c":
                for _ in range(CLOCKS):
                    _exactly(peer, 1)
                    peer.sendall(CLOCK.pack(time.time()))
            elif head[TOKEN:] == b"b":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
                peer.sendall(COUNT.pack(_count(peer)))

    def _datagrams(self) -> None:
        while not self._over:
            try:
                data, sender = self._udp.recvfrom(1 << 16)
                if hmac.compare_digest(data[:TOKEN], self._token):
                    self._udp.sendto(data[:TOKEN] + len(data).to_bytes(4, "big"), sender)
            except OSError:
                if self._over:
                    return


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        if not more:
            raise ConnectionError("the connection was closed")
        data += more
    return data


def _count(peer: socket.socket) -> int:
    """Bytes until the sender says that it is done."""
    buffer, total = bytearray(CHUNK), 0
    while got := peer.recv_into(buffer):
        total += got
    return total


def _connect(address: str, port: int, token: bytes, command: bytes) -> socket.socket:
    made = socket.create_connection((address, port), timeout=CONNECT_S)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.sendall(token + command)
    except OSError:
        made.close()
        raise
    return made


def clock_offset(address: str, port: int, token: bytes) -> tuple[float, float]:
    """(seconds that the other clock is ahead of this one, how far that may be wrong): half the shortest way there and
    back. OSError if the port cannot be reached."""
    readings = []
    with _connect(address, port, token, b"c") as there:
        for _ in range(CLOCKS):
            began = time.perf_counter()  # before the clock is read: a pause of this process in between counts as way
            sent = time.time()
            there.sendall(b"?")
            (clock,) = CLOCK.unpack(_exactly(there, CLOCK.size))
            took = time.perf_counter() - began
            readings.append((took / 2, clock - sent - took / 2))
    half, offset = min(readings)
    return offset, half


def bytes_per_second(address: str, port: int, token: bytes, seconds: float) -> float:
    """What arrives there, by its count, while this node sends as fast as it can for some seconds; the time is that
    until the other side says that it has everything, so that neither side's buffers count as speed."""
    chunk = bytes(CHUNK)
    with _connect(address, port, token, b"b") as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        began = time.perf_counter()
        while time.perf_counter() < began + seconds:
            there.sendall(chunk)
        there.shutdown(socket.SHUT_WR)
        (total,) = COUNT.unpack(_exactly(there, COUNT.size))
        return total / (time.perf_counter() - began)


@dataclass(frozen=True)
class PacketAnswer:
    """Whether a packet of this size (bytes, with its headers) arrived whole, and why it was not sent if it was not."""

    size: int
    arrived: bool
    why: str = ""


def packet_arrives(address: str, port: int, token: bytes, size: int) -> PacketAnswer:
    """Send a packet of `size` bytes that may not be cut into pieces, a few times, until the other node confirms it."""
    family = family_of(address)
    data = token + bytes(size - HEADERS[family] - len(token))
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        if family == socket.AF_INET:
            udp.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        else:
            udp.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IP_PMTUDISC_PROBE)
            udp.setsockopt(socket.IPPROTO_IPV6, IPV6_DONTFRAG, 1)
        udp.connect((address, port))
        udp.settimeout(DATAGRAM_S)
        for _ in range(TRIES):
            try:
                udp.send(data)
                said = udp.recv(64)
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    return PacketAnswer(size, False, "larger than this node's own MTU")
                return PacketAnswer(size, False, error.strerror or str(error))
            if said[:TOKEN] == token and int.from_bytes(said[TOKEN:], "big") == len(data):
                return PacketAnswer(size, True)
    return PacketAnswer(size, False, "no answer")
