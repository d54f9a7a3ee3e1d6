"""Lists of hosts: SLURM's compressed form, and files with one host per line, in the order of the nodes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.launch.network import interfaces
from phalanx.layout.positions import BadPositions, expand_hosts

HOST_FILE = "PHALANX_HOST_FILE"


def expand(nodes: str) -> list[str]:
    """`gpu[03-05,9],x1` -> gpu03, gpu04, gpu05, gpu9, x1: the names of a SLURM list, in its order. A text that is no
    list is one name."""
    try:
        return expand_hosts(nodes)
    except BadPositions:
        return [nodes]


def first_host(nodes: str) -> str:
    """`gpu[03-07,9],x1` -> `gpu03`: the first name of a SLURM list."""
    return next(iter(expand(nodes)), nodes)


@dataclass(frozen=True)
class HostNumber:
    """This machine's line in a host file: `number` of `count`, and the first host. tasks: how many were started, if a
    scheduler says so."""

    number: int
    count: int
    first: str
    tasks: int | None = None


def read_hosts(path: str | Path) -> list[str]:
    """Hosts of a file, one a line; `#` begins a comment, and what follows a name (Open MPI's slots=8) is not read."""
    lines = (line.partition("#")[0].split() for line in Path(path).read_text(encoding="utf-8").splitlines())
    return [words[0] for words in lines if words]


def number_of(path: str, env: Mapping[str, str]) -> tuple[HostNumber | None, Problem | None]:
    """Which host of the file this machine is: by SLURM's name for it, by its host name, short or whole, or by an
    address of one of its interfaces."""
    try:
        hosts = read_hosts(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        return None, Problem(HOST_FILE, path, f"cannot be read ({reason})", {}, (), "the environment")
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        return None, Problem(HOST_FILE, path, "must name each host once", {"twice": ", ".join(twice)}, (), "the file")
    own = {name for name in (env.get("SLURMD_NODENAME", ""), socket.gethostname()) if name}
    found = _places(hosts, own) or _by_address(hosts)
    if len(found) != 1:
        rule = "must name this host on one of its lines" + (", and names it on several" if found else "")
        because = {"host": ", ".join(sorted(own)), "lines": ", ".join(hosts[:8])}
        return None, Problem(HOST_FILE, path, rule, because, (), "the environment")
    tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "")) if "SLURM_STEP_ID" in env else ""
    return HostNumber(found[0], len(hosts), hosts[0], int(tasks) if tasks.isdigit() else None), None


def _places(hosts: list[str], own: set[str]) -> list[int]:
    short = {name.partition(".")[0] for name in own}
    exact = [i for i, host in enumerate(hosts) if host in own]
    return exact or [i for i, host in enumerate(hosts) if not host[0].isdigit() and host.partition(".")[0] in short]


def _by_address(hosts: list[str]) -> list[int]:
    here = {address for _, address in interfaces() if not address.startswith("127.")}
    found = []
    for i, host in enumerate(hosts):
        try:
            addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
        except OSError:
            continue
        if addresses & here:
            found.append(i)
    return found
