"""The environment of a node's ranks: threads, network interfaces, and the CPUs next to each rank's GPU. A value that
the user has set wins. All of it is known, and printed, before CUDA starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.launch.network import BACKENDS

THREADS = "OMP_NUM_THREADS"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # PyTorch's names of it, the newer first
OWN_BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # a user who binds threads binds them all


@dataclass(frozen=True)
class NodeSettings:
    """chosen: environment variables and their values; given: those that the user had set, and that stay; cpus: of each
    rank, None: all that the node's job may use; allocator: why PyTorch's CUDA allocator keeps its defaults, "" without
    GPUs or where the user has set it."""

    chosen: dict[str, str]
    given: dict[str, str]
    cpus: tuple[frozenset[int], ...] | None = None
    allocator: str = ""

    def text(self, node: str, first: int) -> str:
        """One line for the log. first: the number of the node's first rank."""
        words = [f"{name}={value}" for name, value in self.chosen.items()]
        if self.cpus is not None:
            words += [f"rank {first + i} on CPUs {span_text(cpus)}" for i, cpus in enumerate(self.cpus)]
        words += [self.allocator] if self.allocator else []
        yours = "".join(f"; yours: {name}={value}" for name, value in self.given.items())
        return f"node {node}: {', '.join(words)}{yours}"


def node_settings(
    before: Mapping[str, str],
    env: Mapping[str, str],
    ranks: int,
    allowed: frozenset[int],
    root: Path = Path("/"),
    cuda_graphs: bool = True,
) -> NodeSettings:
    """For `ranks` ranks that share the CPUs `allowed`.

    before  the environment as the user set it; env: the same after the network was settled (network.settle)
    root    of the file system that describes the machine
    cuda_graphs   whether the plan may capture blocks in CUDA graphs
    """
    shown = (THREADS, *BACKENDS, *OWN_BINDING, *ALLOCATOR)
    given = {name: env[name] for name in shown if before.get(name) == env.get(name, "")}
    chosen = {} if THREADS in env else {THREADS: str(max(1, len(allowed) // ranks))}
    chosen |= {name: env[name] for name in BACKENDS if name in env and name not in given}
    bound = any(name in env for name in OWN_BINDING)
    cpus = None if bound else cpus_next_to_gpus(env, ranks, allowed, root)
    theirs = any(name in env for name in ALLOCATOR) or not visible_gpus(env, root)
    return NodeSettings(chosen, given, cpus, "" if theirs else allocator_text(ranks, cuda_graphs))


def allocator_text(ranks: int, cuda_graphs: bool) -> str:
    """What is said of PyTorch's CUDA allocator. No plan of ours sets expandable segments, its one setting against
    fragmentation: PyTorch kept them out of the pools of CUDA graphs (pytorch #128068, #194767), and memory that ranks
    share with each other cannot lie in them (pytorch #187465)."""
    uses = [name for name, used in (("CUDA graphs", cuda_graphs), ("symmetric memory", ranks > 1)) if used]
    if uses:
        return f"allocator as PyTorch's defaults (no expandable segments: {' and '.join(uses)})"
    return f"allocator as PyTorch's defaults (if memory is fragmented: {ALLOCATOR[1]}=expandable_segments:True)"


def cpus_next_to_gpus(
    env: Mapping[str, str], ranks: int, allowed: frozenset[int], root: Path
) -> tuple[frozenset[int], ...] | None:
    """The CPUs of each rank: its share of those on the NUMA node of its GPU. None where there are fewer GPUs than
    ranks, or where a rank would have no CPU."""
    gpus = visible_gpus(env, root)[:ranks]
    near = [local_cpus(gpu, root) for gpu in gpus]
    if len(gpus) < ranks:
        return None
    shares = []
    for rank, cpus in enumerate(near):
        beside = [other for other in range(ranks) if near[other] == cpus]
        shares.append(frozenset(share(cpus, beside.index(rank), len(beside)) & allowed))
    return tuple(shares) if all(shares) else None


def visible_gpus(env: Mapping[str, str], root: Path) -> list[str]:
    """PCI addresses of NVIDIA's GPUs that this process may use, in CUDA's order for GPUs of one kind."""
    found: dict[str, str] = {}  # address -> UUID
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        rows = (line.partition(":")[::2] for line in path.read_text(encoding="utf-8").splitlines())
        found[path.parent.name.lower()] = {name.strip(): value.strip() for name, value in rows}.get("GPU UUID", "")
    every, wanted = list(found), env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return every
    chosen = []
    for word in filter(None, (word.strip() for word in wanted.split(","))):
        if word.isdigit() and int(word) < len(every):
            chosen.append(every[int(word)])
        else:
            chosen += [address for address, uuid in found.items() if uuid and uuid.startswith(word)]
    return chosen


def local_cpus(gpu: str, root: Path) -> frozenset[int]:
    """CPUs on the NUMA node of a PCI device; none if the system does not say."""
    try:
        return parse_cpus((root / "sys/bus/pci/devices" / gpu / "local_cpulist").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """`0-3,8` -> 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for span in filter(None, text.strip().split(",")):
        low, _, high = span.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return frozenset(found)


def spans(cpus: frozenset[int]) -> list[range]:
    found: list[range] = []
    for cpu in sorted(cpus):
        if found and found[-1].stop == cpu:
            found[-1] = range(found[-1].start, cpu + 1)
        else:
            found.append(range(cpu, cpu + 1))
    return found


def span_text(cpus: frozenset[int]) -> str:
    return ",".join(f"{s.start}-{s.stop - 1}" if len(s) > 1 else f"{s.start}" for s in spans(cpus))


def share(cpus: frozenset[int], index: int, count: int) -> frozenset[int]:
    """The `index`-th of `count` equal parts of each span: hardware threads of one core are numbered in two spans, so
    they stay together."""
    found: set[int] = set()
    for span in spans(cpus):
        found |= set(span[len(span) * index // count : len(span) * (index + 1) // count])
    return frozenset(found)


def allowed_cpus() -> frozenset[int]:
    """CPUs that this process may use: a scheduler may have given it a part of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def bind(pid: int, cpus: Sequence[frozenset[int]] | None, index: int) -> None:
    """Let a process that has just started, and its threads, run on its CPUs alone."""
    if cpus is not None and hasattr(os, "sched_setaffinity"):
        with suppress(ProcessLookupError):  # it has ended already
            os.sched_setaffinity(pid, cpus[index])
