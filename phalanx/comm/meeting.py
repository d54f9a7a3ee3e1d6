"""Where ranks meet: torch's store, bound to one address, and texts in it that are signed by ranks of this run.

torch's store authenticates nobody. So nothing that comes out of it is unpickled by us, and nothing is trusted unless it
is signed with the run's secret. `SignedStore` puts an HMAC before each text, over its key and its text, with a key that
belongs to this start of this run. `recognise` agrees on that key before ranks connect to each other:

  rank r              -> nonce/r    a random number of its own, and whether it has a secret
  rank 0              -> session    a hash of all nonces, and who has no secret
                      -> welcome/r  r's nonce, signed: rank r knows that rank 0 has the secret and that nothing is
                                    replayed
  rank r              -> here/r     the session, signed: rank 0 knows the same about rank r
  rank 0              -> verdict    signed: who has another secret
  rank r, if refused  -> left/r     so that rank 0, which may hold the store, ends last

If no rank has a secret there is no SignedStore, and ranks exchange nothing except through collectives.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, PeerLost, Problem
from phalanx.base.placement import MEETING, RANKS, SECRET
from phalanx.comm.reach import CONNECT_S, reach, reach_myself

LAST_S = 3.0  # how long rank 0 waits until all refused ranks know it
LONGEST_PAUSE_S = 0.1  # between two polls
SHOWN = 8  # ranks in one message


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at this address and no other. OSError if it cannot."""
    return socket.create_server(
        (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=1024
    )


def serve(listener: socket.socket) -> dist.TCPStore:
    """The store on that socket, which then belongs to the store. It lives as long as the returned value."""
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def open_store(init_method: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store that an `init_method` refers to.

    MEETING host:port/name          the store that a launcher serves there; each attempt has its own name
    tcp://host:port[?listen=addr]   rank 0 serves it, only at the address of host or at `addr`
    others                          torch's
    """
    if init_method.startswith(MEETING):
        address, _, name = init_method.removeprefix(MEETING).partition("/")
        host, _, port = address.rpartition(":")
        reach(host, int(port), rank, timeout.total_seconds())
        return dist.PrefixStore(name, dist.TCPStore(host, int(port), None, False, timeout))
    if init_method.startswith("tcp://"):
        parts = urlsplit(init_method)
        host, port_number = parts.hostname or "", parts.port or 0
        if rank == 0:
            address = parse_qs(parts.query).get("listen", [host])[0]
            store = _serve_at(address, port_number)
            reach_myself(host, port_number)
            return store
        reach(host, port_number, rank, timeout.total_seconds())
        return dist.TCPStore(host, port_number, None, False, timeout)
    store, _, _ = next(dist.rendezvous(init_method, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return store


def _serve_at(host: str, port: int) -> dist.TCPStore:
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        return serve(listen(str(address), port))
    except OSError as error:
        raise PeerLost(f"rank 0 cannot listen at {host}:{port}, where the others are to meet it: {error}") from error


class SignedStore:
    """Texts under keys of a torch store. Texts not written by this run's ranks are treated as missing; `refused` counts
    them."""

    def __init__(self, store: dist.Store, key: bytes):
        self._store, self._key = store, key
        self.refused = 0

    def clone(self, patience_s: float) -> SignedStore:
        """The same over a separate connection, because a waiting one blocks all others; an answer may take
        `patience_s`."""
        store = self._store.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=patience_s))
        return SignedStore(store, self._key)

    def set(self, key: str, text: str) -> None:
        self._store.set(key, self._signature(key, text.encode()) + text)

    def get(self, key: str) -> str | None:
        """What a rank wrote there, if any."""
        return self.read([key]).get(key)

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """What ranks wrote under those of the keys that exist. If all exist and the store supports it, they are read in
        one request."""
        if self._store.has_extended_api() and self._store.check(list(keys)):  # type: ignore[attr-defined]
            return self._believed(zip(keys, self._store.multi_get(list(keys))))
        return self._believed((key, self._store.get(key)) for key in keys if self._store.check([key]))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether something is stored under each key, by whomever."""
        return self._store.check(list(keys))

    def _believed(self, values: Iterable[tuple[str, bytes]]) -> dict[str, str]:
        found = {}
        for key, value in values:
            signature, data = value[:64], value[64:]
            if hmac.compare_digest(signature, self._signature(key, data).encode()):
                found[key] = data.decode()
            else:
                self.refused += 1
        return found

    def _signature(self, key: str, data: bytes) -> str:
        name = key.encode()
        return hmac.new(self._key, len(name).to_bytes(4, "big") + name + data, hashlib.sha256).hexdigest()


def recognise(store: dist.Store, rank: int, world_size: int, secret: str, timeout_s: float) -> SignedStore | None:
    """Check that all ranks have the same secret; returns None if none has one.

    Raises ConfigError on every rank if they differ, and PeerLost naming the ranks that did not come in time.
    """
    here = _Meeting(store, rank, world_size, secret, time.monotonic() + timeout_s)
    try:
        return here.recognise()
    except ConfigError:
        here.leave()
        raise


def say_died(store: dist.Store, secret: str, rank: int, why: str) -> None:
    """For a launcher, which has the secret and serves the store: report what happened to one of its ranks that cannot
    report it itself."""
    ranks = dist.PrefixStore("phalanx", dist.PrefixStore(RANKS, store))
    with suppress(RuntimeError, dist.DistError, ConfigError):
        if ranks.check(["session"]):
            signed = SignedStore(ranks, _key(secret, _session(ranks.get("session"))[0]))
            signed.set(f"failed/{rank}", json.dumps([time.time(), why]))


def say_died_there(address: tuple[str, int], secret: str, rank: int, why: str) -> None:
    """As `say_died`, for the launcher of another machine than the one that serves the store, at `address`."""
    with suppress(RuntimeError, dist.DistError):
        store = dist.TCPStore(*address, None, False, timedelta(seconds=CONNECT_S))
        say_died(store, secret, rank, why)


@dataclass(frozen=True)
class _Meeting:
    """One rank's side of `recognise`. until: on the monotonic clock."""

    store: dist.Store
    rank: int
    world_size: int
    secret: str
    until: float

    def recognise(self) -> SignedStore | None:
        nonce = secrets.token_hex(16)
        self.store.set(f"nonce/{self.rank}", f"{int(bool(self.secret))}{nonce}")
        if self.rank == 0:
            self._introduce()
        self._await(["session"])
        session, without = _session(self.store.get("session"))
        if not self.secret and len(without) == self.world_size:
            return None
        if without or not self.secret:
            raise _refusal(
                f"is not set for {_ranks(without, self.world_size)}"
                if without
                else "is set for other ranks than this one"
            )
        return self._prove(nonce, session)

    def _introduce(self) -> None:
        """Rank 0: read everybody's nonce, and answer."""
        keys = [f"nonce/{r}" for r in range(self.world_size)]
        self._await(keys)
        said = [self.store.get(key)[:64].decode(errors="replace") for key in keys]
        session = hashlib.sha256(" ".join(said).encode()).hexdigest()
        without = [r for r, text in enumerate(said) if not text.startswith("1")]
        signed = SignedStore(self.store, _key(self.secret, session))
        for r, text in enumerate(said if self.secret else []):
            signed.set(f"welcome/{r}", text[1:])
        self.store.set("session", json.dumps([session, without]))

    def _prove(self, nonce: str, session: str) -> SignedStore:
        signed = SignedStore(self.store, _key(self.secret, session))
        if signed.get(f"welcome/{self.rank}") != nonce:
            raise _refusal(f"of {_ranks([self.rank], self.world_size)} is another than that of rank 0")
        signed.set(f"here/{self.rank}", session)
        if self.rank == 0:
            signed.set("verdict", json.dumps(self._strangers(signed, session)))
        self._await(["verdict"])
        verdict = signed.get("verdict")
        strangers = [0] if verdict is None else json.loads(verdict)
        if strangers:
            raise _refusal(f"of {_ranks(strangers, self.world_size)} is another than that of the others")
        return signed

    def _strangers(self, signed: SignedStore, session: str) -> list[int]:
        """Rank 0: the ranks with another secret."""
        here = [f"here/{r}" for r in range(self.world_size)]
        left = [f"left/{r}" for r in range(self.world_size)]
        self._poll(
            lambda: [
                r for r in range(self.world_size) if not (self.store.check([here[r]]) or self.store.check([left[r]]))
            ]
        )
        known = signed.read(here)
        return [r for r, key in enumerate(here) if known.get(key) != session]

    def _await(self, keys: list[str]) -> None:
        """Wait until all keys exist."""
        if len(keys) == 1:
            self._poll(lambda: [] if self.store.check(keys) else [0])
        else:
            self._poll(
                lambda: (
                    [] if self.store.check(keys) else [r for r, key in enumerate(keys) if not self.store.check([key])]
                )
            )

    def _poll(self, missing: Callable[[], list[int]]) -> None:
        """Wait until no rank is missing; PeerLost names those that are. Polls, because signals are not handled while
        torch waits."""
        pause = 0.001
        while ranks := missing():
            if time.monotonic() > self.until:
                raise PeerLost(f"{_ranks(ranks, self.world_size)} did not come to where the ranks meet")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def leave(self) -> None:
        """Report that this rank knows that it is refused; rank 0, which may hold the store, stays until all others have
        read the verdict."""
        with suppress(RuntimeError, dist.DistError, PeerLost):
            self.store.set(f"left/{self.rank}", "1")
            if self.rank == 0:
                last = replace(self, until=min(self.until, time.monotonic() + LAST_S))
                last._await([f"left/{r}" for r in range(self.world_size)])


def _session(value: bytes) -> tuple[str, list[int]]:
    """The session that rank 0 wrote. Anybody may have written it; `welcome` shows who did."""
    try:
        session, without = json.loads(value)
        return str(session), [int(r) for r in without]
    except (ValueError, TypeError, RecursionError):
        raise _refusal(
            "cannot help: what rank 0 says cannot be read, so somebody else writes to the ranks' store"
        ) from None


def _key(secret: str, session: str) -> bytes:
    return hmac.new(secret.encode(), f"phalanx run {session}".encode(), hashlib.sha256).digest()


def _ranks(ranks: Sequence[int], world_size: int) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:SHOWN]))}{more} of {world_size}"


def _refusal(rule: str) -> ConfigError:
    """The value of the secret is never shown."""
    return ConfigError(
        [Problem(SECRET, "(not shown)", f"{rule}; start all ranks with the same one", {}, (), "the environment")]
    )
