"""The network of a run's ranks: loopback only on one host, one interface between several hosts. Examines this machine's
interfaces."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from phalanx.base.errors import ConfigError, Problem
from phalanx.base.placement import Placement
from phalanx.launch.enroot import without_hook

INTERFACE = "PHALANX_INTERFACE"
CHECK_NODES = "PHALANX_CHECK_NODES"
BACKENDS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"
IN_PODS = ("JOB_COMPLETION_INDEX", "PET_NODE_RANK")  # variables of Indexed Jobs, and of Kubeflow's pods
RESOLVE_S = 15.0  # for which a name service may think
SAY_S = 15.0  # for which a pod waits for rank 0's name before it says so
PAUSE_S = 1.0  # between two questions to it


def loopback() -> str:
    """The name of this machine's loopback interface."""
    return next((name for name, address in interfaces() if address == LOOPBACK), "lo")


def stay_inside(env: MutableMapping[str, str]) -> None:
    """For ranks that are all on this host: make torch's backends listen where no other host can reach them, whatever
    was set."""
    inside = loopback()
    for name in BACKENDS:
        env[name] = inside


def settle(placement: Placement, env: MutableMapping[str, str], patience_s: float = 0.0) -> Placement:
    """For a rank that somebody else started: choose where it listens, and configure torch's backends through `env`.

    On one host that is loopback. Between several it is the interface named by PHALANX_INTERFACE, or else the one by
    which rank 0 is reached; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are not changed if they are set.

    patience_s: in a pod of Kubernetes, for how long rank 0's name may be unknown.
    """
    if placement.world_size == 1:
        return placement
    host = urlsplit(placement.init_method).hostname or env.get("MASTER_ADDR", "")
    served_here = placement.init_method.startswith("tcp://")  # by rank 0; else torchrun's agent does
    if placement.starts == placement.world_size or (
        not placement.starts and on_one_host(placement.world_size, host, env)
    ):
        stay_inside(env)
        port = urlsplit(placement.init_method).port
        return replace(placement, init_method=f"tcp://{LOOPBACK}:{port}") if served_here else placement
    if any(variable in env for variable in IN_PODS):
        wait_for_name(host, placement.rank, patience_s)
    name, address = _interface(host, env, placement.rank)
    for backend in BACKENDS:
        env.setdefault(backend, name)
        env[backend] = name if INTERFACE in env else env[backend]
    used = env[BACKENDS[0]].split(",")[0]
    address_of = dict(reversed(interfaces()))
    placement = replace(placement, interface=used, address=address_of.get(used, ""), check_nodes=asks_for_checks(env))
    if served_here and placement.rank == 0:
        return replace(placement, init_method=f"{placement.init_method}?listen={address}")
    return placement


def asks_for_checks(env: Mapping[str, str]) -> bool:
    """Whether machines are checked before ranks connect. ConfigError for a value that is neither 0 nor 1."""
    said = env.get(CHECK_NODES, "1")
    if said not in ("0", "1"):
        rule = "must be 1 (machines are checked before ranks connect, as if it were unset) or 0 (they are not)"
        raise _problem(CHECK_NODES, said, rule, ("0", "1"))
    return said == "1"


def on_one_host(world_size: int, host: str, env: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host, according to torchrun or SLURM, or else because rank 0's address is
    loopback."""
    local = env.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit():
        return int(local) == world_size
    env = without_hook(env)
    nodes = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "")) if "RANK" not in env else ""
    if nodes.isdigit():
        return int(nodes) == 1
    return host in ("localhost", LOOPBACK, "::1")


def _interface(host: str, env: Mapping[str, str], rank: int) -> tuple[str, str]:
    """(name, address) of the interface that is chosen, or by which this host reaches rank 0's host, possibly itself."""
    there = interfaces()
    names = tuple(dict.fromkeys(name for name, address in there if not _is_loopback(address)))
    addresses = {name: address for name, address in reversed(there)}
    wanted = env.get(INTERFACE)
    if wanted is not None and wanted not in addresses:
        raise _problem(INTERFACE, wanted, "must be a network interface of this host that has an address", names)
    address = _own_address(host)
    if _is_loopback(address):
        wanted = wanted or next((env[name] for name in BACKENDS if env.get(name) in names), None)
        if wanted is None:
            rule = (
                f"means {address} on this host, where no other host can reach it; name the network "
                "interface that the ranks use"
            )
            raise _problem("MASTER_ADDR", host, rule, tuple(f"{INTERFACE}={name}" for name in names))
        return wanted, addresses[wanted]
    if wanted is not None and rank == 0 and (wanted, address) not in there:
        raise _problem(
            "MASTER_ADDR",
            host,
            f"means {address} on this host, which is not an address of {INTERFACE}={wanted}",
            (addresses[wanted],),
        )
    return wanted or next(name for name, known in there if known == address), address


def _own_address(host: str) -> str:
    """The address of this host's interface from which it reaches `host`."""
    try:
        family, kind, protocol, _, there = _resolved(host)
        with socket.socket(family, kind, protocol) as way:
            way.connect(there)  # nothing is sent
            return str(way.getsockname()[0])
    except OSError as error:
        rule = (
            f"must be the name or address of rank 0's host, but this host cannot reach it ({error.strerror or error})"
        )
        raise _problem("MASTER_ADDR", host, rule) from error


def _resolved(host: str) -> Any:
    """The first address of a host. OSError, also if the name service does not answer: it may think for minutes."""
    found: list[Any] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0])
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look_up, daemon=True, name="look-up")
    thread.start()
    thread.join(RESOLVE_S)
    if not found:
        raise OSError(f"the name service does not answer within {RESOLVE_S:g} s")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def wait_for_name(host: str, rank: int, patience_s: float) -> None:
    """Wait until a pod's name is known, and on rank 0 means this pod: its record is made while the pod starts, and for
    some seconds after a restart it still is that of the pod before. Says so after SAY_S, and returns after `patience_s`
    whatever became of it."""
    began, said = time.monotonic(), False
    while (why := _not_yet(host, rank)) is not None:
        waited = time.monotonic() - began
        if waited >= patience_s:
            return
        if waited >= SAY_S and not said:
            said = True
            text = f"rank {rank} waits for rank 0's name {host} ({why}); it goes on waiting for {patience_s:.0f} s"
            print(f"warning: {text}", file=sys.stderr, flush=True)
        time.sleep(PAUSE_S)


def _not_yet(host: str, rank: int) -> str | None:
    try:
        address = _resolved(host)[4][0]
    except OSError as error:
        return error.strerror or str(error)
    if rank == 0 and not _is_loopback(address) and address not in {known for _, known in interfaces()}:
        return f"it means {address}, which is not an address of this pod"
    return None


def _problem(name: str, value: str, rule: str, valid: tuple[str, ...] = ()) -> ConfigError:
    return ConfigError([Problem(name, value, rule, {}, valid, "the environment")])


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def own_address(name: str) -> tuple[str, str]:
    """(address, interface) at which this host listens: of PHALANX_INTERFACE, else what its name means, else where ssh
    came in, else of the first interface."""
    there = [(known, interface) for interface, known in interfaces()]
    outside = [one for one in there if not _is_loopback(one[0])]
    wanted = os.environ.get(INTERFACE)
    if wanted is not None:
        chosen = [one for one in there if one[1] == wanted]
        if not chosen:
            rule = "must be a network interface of this host that has an address"
            raise ConfigError([Problem(INTERFACE, wanted, rule, {}, tuple(i for _, i in outside), "the environment")])
        return chosen[0]
    try:
        meant = {str(answer[4][0]) for answer in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        meant = set()  # which `names` reports
    came_in = os.environ.get("SSH_CONNECTION", "").split(" ")[2:3]
    for one in outside:
        if one[0] in meant:
            return one
    for one in outside:
        if one[0] in came_in:
            return one
    return outside[0] if outside else (LOOPBACK, loopback())


class _Interface(ctypes.Structure):
    """The head of C's `struct ifaddrs`, which Linux and macOS share."""


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> list[tuple[str, str]]:
    """(name, address) of every address of this host's network interfaces, those of IPv4 first."""
    c = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if c.getifaddrs(ctypes.byref(first)):
        raise OSError(ctypes.get_errno(), "cannot list this host's network interfaces")
    found, here = [], first
    try:
        while here:
            if here.contents.address and (address := _address(here.contents.address)):
                found.append((os.fsdecode(here.contents.name), address))
            here = here.contents.next
    finally:
        c.freeifaddrs(first)
    return sorted(found, key=lambda one: ":" in one[1])


def _address(pointer: int) -> str | None:
    """Of a C `struct sockaddr`; None of one that is no address of the Internet."""
    head = ctypes.string_at(pointer, 2)
    family = head[1] if sys.platform == "darwin" else struct.unpack("=H", head)[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(pointer, 8)[4:8])
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(pointer, 24)[8:24])
    return None
