"""Channels between the coordinator of a preflight and its nodes: lines of JSON, each signed with the run's secret.

Two kinds. Under srun, torchrun or in pods a node connects over TCP to the address where ranks meet. From a list of
hosts, the coordinator starts a process on each through ssh and talks over its standard input and output.

Over TCP both sides prove that they have the same secret before anything else is read:

  coordinator -> node   a random number of its own
  node -> coordinator   its rank and host, a random number of its own, and both signed
  coordinator -> node   both signed the other way, or the reason of a refusal

From then on each line is its signature (over direction, number and text) and its text. Without a secret the key is
known to everybody, and the signatures protect nothing, as in training (docs/clusters.md).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, PeerLost, PhalanxError, Problem
from phalanx.base.placement import SECRET
from phalanx.preflight.probe import family_of

LONGEST = 1 << 22  # bytes of a line
HELLO_S = 10.0
SIGNATURE = 64  # characters
LONGEST_TRY_S, RETRY_S = 5.0, 0.2


class ChannelLost(PhalanxError):
    """The other side of a channel is gone, does not answer in time, or says what cannot be believed."""

    exit_code = 8


class Channel:
    """Messages both ways over two file descriptors, which belong to it. key: of the signatures; None: lines are not
    signed, because the way itself is private (ssh)."""

    def __init__(self, reads: int, writes: int, key: bytes | None, coordinates: bool):
        self._reads, self._writes, self._key = reads, writes, key
        self._mine, self._theirs = (b"c", b"n") if coordinates else (b"n", b"c")
        self._sent = self._received = 0
        self._ready = select.poll()  # unlike select, it takes file numbers above 1,023
        self._ready.register(reads, select.POLLIN)
        self._buffer = b""

    def sign_with(self, key: bytes) -> Channel:
        """From here on lines are signed; what has already arrived is read so too."""
        self._key = key
        self._sent = self._received = 0
        return self

    def send(self, message: Mapping[str, Any]) -> None:
        text = json.dumps(message).encode()
        line = text if self._key is None else self._sign(self._mine, self._sent, text) + text
        self._sent += 1
        send_all(self._writes, line + b"\n")

    def receive(self, limit_s: float | None) -> dict[str, Any]:
        """The next message. ChannelLost if none comes in time, or it is not signed by the other side."""
        line = self._line(None if limit_s is None else time.monotonic() + limit_s)
        if self._key is not None:
            signature, line = line[:SIGNATURE], line[SIGNATURE:]
            if not hmac.compare_digest(signature, self._sign(self._theirs, self._received, line)):
                raise ChannelLost("what it says is not signed by this run")
        self._received += 1
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ChannelLost(f"what it says cannot be read: {line[:100]!r}") from error
        if not isinstance(message, dict):
            raise ChannelLost(f"what it says cannot be read: {line[:100]!r}")
        return message

    def receive_any(self, limit_s: float) -> dict[str, Any]:
        """The next line, {} if it is no message: a shell may print something before its program speaks."""
        try:
            message = json.loads(self._line(time.monotonic() + limit_s))
        except (ValueError, RecursionError):
            return {}
        return message if isinstance(message, dict) else {}

    def _line(self, until: float | None) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > LONGEST:
                raise ChannelLost("it says too much at once")
            left = None if until is None else until - time.monotonic()
            if left is not None and (left <= 0 or not self._ready.poll(1e3 * left)):
                raise ChannelLost("it does not answer")
            try:
                more = os.read(self._reads, 1 << 16)
            except OSError as error:
                raise ChannelLost(f"the connection is gone ({error.strerror})") from error
            if not more:
                raise ChannelLost("it ended")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _sign(self, direction: bytes, number: int, text: bytes) -> bytes:
        head = direction + number.to_bytes(8, "big")
        return hmac.new(self._key or b"", head + text, hashlib.sha256).hexdigest().encode()

    def close(self) -> None:
        for number in {self._reads, self._writes}:
            os.close(number)


def send_all(number: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(number, data) :]
        except OSError as error:
            raise ChannelLost(f"the connection is gone ({error.strerror})") from error


@dataclass(frozen=True)
class Member:
    """Who calls: its rank of the world, its number among the ranks of its node, and the names and addresses of its
    host."""

    rank: int
    local_rank: int
    name: str
    address: str = ""
    interface: str = ""


def _proof(secret: str, side: str, numbers: str, member: str = "") -> str:
    text = f"phalanx preflight {side} {numbers} {member}".encode()
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def _key(secret: str, numbers: str) -> bytes:
    return hmac.new(secret.encode(), f"phalanx preflight key {numbers}".encode(), hashlib.sha256).digest()


def refused(rule: str) -> ConfigError:
    """The value of the secret is never shown."""
    return ConfigError([Problem(SECRET, "(not shown)", rule, {}, (), "the environment")])


@dataclass(frozen=True)
class Handshake:
    """One that called: who it is and a channel to it, or why it is turned away. rank: -1 if it did not even say."""

    rank: int = -1
    member: Member | None = None
    channel: Channel | None = None
    why: str = ""


def handshake_with(connection: socket.socket, secret: str) -> Handshake:
    """The coordinator's side with one that connected: both prove that they have the secret."""
    connection.setblocking(True)
    file = connection.detach()
    plain = Channel(file, file, None, True)
    mine, rank = secrets.token_hex(16), -1
    try:
        plain.send({"number": mine})
        said = plain.receive(HELLO_S)
        who = said["member"]
        text, numbers, rank = json.dumps(who), f"{mine} {said['number']}", int(who["rank"])
        if not hmac.compare_digest(str(said["proof"]), _proof(secret, "node", numbers, text)):
            plain.send({"refused": True})
            plain.close()
            return Handshake(rank, why=f"{SECRET} is not that of the first node")
        plain.send({"proof": _proof(secret, "coordinator", numbers)})
        member = Member(rank, int(who["local_rank"]), *(str(who[key]) for key in ("name", "address", "interface")))
        return Handshake(rank, member, plain.sign_with(_key(secret, numbers)))
    except (ChannelLost, KeyError, TypeError, ValueError) as error:
        plain.close()
        return Handshake(rank, why=f"it did not introduce itself ({error})")


def connect(host: str, port: int, refused_s: float, unreachable_s: float) -> socket.socket:
    """A connection to host:port, where nothing may listen yet. PeerLost has the last reason.

    It tries for `unreachable_s` while nothing answers at this name or address, and for `refused_s` while its host says
    that nothing listens there.
    """
    began, why = time.monotonic(), "no answer"
    until = began + max(refused_s, unreachable_s)
    while (left := until - time.monotonic()) > 0:
        try:
            made = socket.create_connection((host, port), timeout=min(left, LONGEST_TRY_S))
            made.setblocking(True)
            return made
        except ConnectionRefusedError:
            why = "connection refused: nothing listens there yet, or this is another host's address"
            until = began + refused_s
        except OSError as error:
            unresolved = isinstance(error, socket.gaierror)
            why = f"the name {host} does not resolve ({error.strerror})" if unresolved else error.strerror or str(error)
            if isinstance(error, TimeoutError):
                why = "no answer: a firewall, or no host has this address"
            until = began + unreachable_s
        time.sleep(min(RETRY_S, max(0.0, until - time.monotonic())))
    raise PeerLost(f"the first host cannot be reached at {host}:{port} within {until - began:.0f} s: {why}")


def call(host: str, port: int, member: Member, secret: str, limit_s: float) -> Channel:
    """The node's side: a channel to the coordinator at host:port, which may not listen yet.

    Raises PeerLost with the last reason after `limit_s`, ConfigError if the secrets differ.
    """
    file = connect(host, port, limit_s, limit_s).detach()
    plain = Channel(file, file, None, False)
    theirs = str(plain.receive(limit_s).get("number"))
    mine, who = secrets.token_hex(16), vars(member)
    numbers = f"{theirs} {mine}"
    plain.send({"number": mine, "member": who, "proof": _proof(secret, "node", numbers, json.dumps(who))})
    said = plain.receive(limit_s)
    if "refused" in said:
        raise refused(f"of {member.name} is another than that of the first node; start all with the same one")
    if not hmac.compare_digest(str(said.get("proof")), _proof(secret, "coordinator", numbers)):
        raise refused("of the node where the others meet is another than that here")
    return plain.sign_with(_key(secret, numbers))


def listener(address: str, port: int) -> socket.socket:
    """Where the others call: at one address, no other."""
    try:
        return socket.create_server((address, port), family=family_of(address), backlog=4096)
    except OSError as error:
        where = f"{address}:{port}"
        raise ChannelLost(
            f"the first node cannot listen at {where}, where the others are to meet it: {error}"
        ) from error
