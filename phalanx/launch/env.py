"""The environment of a process: which rank, or which node's starter, torchrun, SLURM, Open MPI, Kubernetes or a host
file started it, and how ranks meet. Starts nothing.

One process per node is the usual form: it starts the node's ranks itself (`Placement.starts`). One process per rank
works as well.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.placement import SECRET, Placement
from phalanx.launch.ends import ENDS_AT
from phalanx.launch.enroot import without_hook
from phalanx.launch.hosts import HOST_FILE, expand, first_host, number_of

__all__ = ["Placement", "first_host", "read_placement"]

SHORTEST = 16  # characters of a run's secret
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun for its own workers
PER_NODE = "PHALANX_RANKS_PER_NODE"
NODE, NODES = "PHALANX_NODE", "PHALANX_NODES"
PORT = 29511  # where rank 0 listens if neither MASTER_PORT nor a job's number says it
WHERE = "the environment"


@dataclass(frozen=True)
class LaunchedTask:
    """What one launcher says of this process: task `number` of `count`, `local` of `local_count` on its node, and where
    the first one is. names: the variables that say so, for messages."""

    number: int
    count: int
    local: int
    local_count: int | None
    host: str
    port: str
    names: tuple[str, ...]


Found = tuple[LaunchedTask | None, list[Problem]]


def read_placement(env: Mapping[str, str]) -> tuple[Placement | None, list[Problem]]:
    """This process's place in a world that someone else started, or None if it is to start its own; and any
    problems. Launchers that contradict each other are one problem, with all their variables."""
    placement, problems = _placement(without_hook(env))
    problems = problems + _integers(env, ENDS_AT)[1]
    return (None if problems else placement), problems


def _placement(env: Mapping[str, str]) -> tuple[Placement | None, list[Problem]]:
    by_hand = ("RANK" in env or "WORLD_SIZE" in env) and AGENT not in env
    torchrun = "RANK" in env or "WORLD_SIZE" in env
    others = {name: find(env) for name, find in LAUNCHERS.items()}
    problems = [problem for _, found in others.values() for problem in found]
    tasks = {name: task for name, (task, _) in others.items() if task is not None}
    if torchrun and not (by_hand and "PET_NODE_RANK" in env):
        placement, own = _from_torchrun(env)
        problems = own or (_contradictions(env, tasks) if by_hand else [])
        return _with_local_size(placement, env.get("LOCAL_WORLD_SIZE", "")), problems
    if problems:
        return None, problems
    several = {name: task for name, task in tasks.items() if task.count > 1} or tasks
    if unlike := _unlike(env, several):
        return None, unlike
    for task in several.values():
        return _from_task(env, task)
    return None, []


def _unlike(env: Mapping[str, str], tasks: Mapping[str, LaunchedTask]) -> list[Problem]:
    """Launchers of as many tasks that number this process differently, or one inside another that is larger."""
    alike = {(task.number, task.count) for name, task in tasks.items() if name != "a host file"}
    if len(alike) < 2 or len({count for _, count in alike}) > 1:
        return []
    return [_contradiction(env, tuple(tasks.values()))]


def _contradictions(env: Mapping[str, str], tasks: Mapping[str, LaunchedTask]) -> list[Problem]:
    """RANK and WORLD_SIZE, set by hand, against what a launcher of several tasks says. A larger WORLD_SIZE is that of
    ranks inside a task."""
    numbers, _ = _integers(env, "RANK", "WORLD_SIZE")
    mine = LaunchedTask(numbers["RANK"], numbers["WORLD_SIZE"], 0, None, "", "", ("RANK", "WORLD_SIZE"))
    for task in tasks.values():
        if task.count > 1 and (mine.count < task.count or (mine.count == task.count and mine.number != task.number)):
            return [_contradiction(env, (mine, task))]
    return []


def _contradiction(env: Mapping[str, str], tasks: tuple[LaunchedTask, ...]) -> Problem:
    there = {name: env[name] for task in tasks for name in task.names if name in env}
    first, *_ = there
    rule = "contradicts what another launcher says of this process; unset the variables that are left from elsewhere"
    return Problem(first, there.pop(first), rule, there, (), WHERE)


def _from_task(env: Mapping[str, str], task: LaunchedTask) -> tuple[Placement | None, list[Problem]]:
    """A task that is a rank, or one that starts the ranks of its node."""
    numbers, problems = _integers(env, PER_NODE)
    problems += _weak_secret(env)
    if PER_NODE not in env and "PET_NODE_RANK" in task.names:
        numbers, wrong = _pet_ranks(env)
        problems += wrong
    if problems:
        return None, problems
    ranks = numbers.get(PER_NODE)
    if ranks is None:
        ranks = _gpus_of(env) if task.local_count == 1 else task.local_count
    if ranks == 0 or (task.local_count not in (None, 1) and ranks != task.local_count):
        because = {name: env[name] for name in task.names if name in env}
        rule = "must be the number of tasks on each node, or there must be one task on each, which starts the ranks"
        return None, [Problem(PER_NODE, ranks, rule, because, (task.local_count or 1,), WHERE)]
    starts = ranks if task.local_count == 1 and ranks is not None and ranks > 1 else 0
    world = task.count * (starts or 1)
    meeting = _tcp(task.host, task.port) if world > 1 and task.count > 1 else ""
    secret = env.get(SECRET, "") if meeting else ""
    if starts:
        return Placement(task.number * starts, 0, world, meeting, secret, local_size=starts, starts=starts), []
    return Placement(task.number, task.local, world, meeting, secret, local_size=task.local_count), []


def _pet_ranks(env: Mapping[str, str]) -> tuple[dict[str, int], list[Problem]]:
    """Ranks of a node by torchrun's default in Kubeflow's pods: a number, or as many as there are GPUs."""
    name = "PET_NPROC_PER_NODE"
    said = env.get(name, "1")
    if said in ("auto", "gpu"):
        return {PER_NODE: max(1, len(list(Path("/dev").glob("nvidia[0-9]*"))))}, []
    numbers, problems = _integers(env, name)
    return {PER_NODE: numbers.get(name, 1)}, problems


def _gpus_of(env: Mapping[str, str]) -> int:
    """GPUs that SLURM gave to the job on this node, of which a single task is to use all."""
    given = env.get("SLURM_GPUS_ON_NODE", "")
    return max(1, int(given)) if given.isdigit() and "SLURM_PROCID" in env else 1


def _with_local_size(placement: Placement | None, size: str) -> Placement | None:
    """The placement, with the number of ranks on this machine if the environment states it."""
    return replace(placement, local_size=int(size)) if placement is not None and size.isdigit() else placement


def tasks_on_node(tasks: str, node: str) -> str:
    """Ranks of node number `node` in SLURM's list: `8(x2),4` and 2 -> 4, as text; empty if it is not stated."""
    counts: list[str] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [count] * int(times or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else ""


def _from_torchrun(env: Mapping[str, str]) -> tuple[Placement | None, list[Problem]]:
    alone = env.get("WORLD_SIZE") == "1"
    wanted = ("RANK", "WORLD_SIZE") if alone else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    problems = _absent(env, wanted, TORCHRUN)
    numbers, wrong = _integers(env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    problems += wrong or _impossible("RANK", "WORLD_SIZE", numbers)
    problems += _weak_secret(env)
    if problems:
        return None, problems
    rank = numbers["RANK"]
    if alone:
        return Placement(rank, numbers.get("LOCAL_RANK", rank), 1), []
    # torchrun serves the store where ranks meet; else rank 0 does
    theirs = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    meeting = "env://" if theirs else _tcp(env["MASTER_ADDR"], env["MASTER_PORT"])
    return Placement(rank, numbers.get("LOCAL_RANK", rank), numbers["WORLD_SIZE"], meeting, env.get(SECRET, "")), []


def _slurm(env: Mapping[str, str]) -> Found:
    """A task of a step of SLURM, also of a heterogeneous one and in a container (pyxis), where there is no `scontrol`.
    Without a step it is the batch script itself, of which there is one."""
    if "SLURM_PROCID" not in env or not ("SLURM_STEP_ID" in env or "SLURM_STEPID" in env):
        return None, []
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    names = ("SLURM_PROCID", size, "SLURM_LOCALID")
    numbers, problems = _integers(env, *names, "MASTER_PORT")
    problems += _absent(env, names, names)
    problems = problems or _impossible("SLURM_PROCID", size, numbers)
    host = env.get("MASTER_ADDR") or _first_of_slurm(env)
    if not problems and numbers[size] > 1 and not host:
        rule, there = "must be set (or MASTER_ADDR), to know where rank 0 is", {n: env[n] for n in names}
        problems = [Problem("SLURM_NODELIST", None, rule, there, (), WHERE)]
    if problems:
        return None, problems
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or "0"
    port = env.get("MASTER_PORT", str(15000 + int(job) % 15000))
    local_count = tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), env.get("SLURM_NODEID", ""))
    count = 1 if numbers[size] == 1 else int(local_count) if local_count else None
    return LaunchedTask(numbers["SLURM_PROCID"], numbers[size], numbers["SLURM_LOCALID"], count, host, port, names), []


def _first_of_slurm(env: Mapping[str, str]) -> str:
    """The host of task 0. The node list of a heterogeneous step is sorted, so its first name need not be that."""
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    for name in ("SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_PACK_GROUP_0"):
        if name in env and first_host(env[name]) in expand(nodes):
            return first_host(env[name])
    return first_host(nodes)


def _open_mpi(env: Mapping[str, str]) -> Found:
    """A process of Open MPI's `mpirun` (orterun, prterun), or of another PMIx launcher, which says no more than the
    rank: the size of the world is then WORLD_SIZE's to say."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if not any(name in env for name in names):
        alone = "PMIX_RANK" in env and not any(name in env for name in ("SLURM_PROCID", "RANK", "WORLD_SIZE"))
        rule = "says which rank this is, but nothing says how many there are: set RANK and WORLD_SIZE from it"
        return None, [Problem("PMIX_RANK", env["PMIX_RANK"], rule, {}, (), WHERE)] if alone else []
    numbers, problems = _integers(env, *names, "MASTER_PORT")
    problems += _absent(env, names, names)
    problems = problems or _impossible(names[0], names[1], numbers)
    if problems:
        return None, problems
    number, count, local, local_count = (numbers[name] for name in names)
    together = env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", ""))
    port = env.get("MASTER_PORT", str(15000 + zlib.crc32(together.encode()) % 15000))
    host = env.get("MASTER_ADDR", "127.0.0.1" if local_count == count else "")
    if not host:
        rule = "must be set, to know where rank 0 is: mpirun -x MASTER_ADDR=HOST, the first host"
        return None, [Problem("MASTER_ADDR", None, rule, {name: env[name] for name in names}, (), WHERE)]
    # mpirun starts one process for each slot; one for each node is said with --map-by ppr:1:node
    return LaunchedTask(number, count, local, local_count, host, port, names), []


def _node(env: Mapping[str, str]) -> Found:
    """The process of node PHALANX_NODE of PHALANX_NODES, as `phalanx launch ssh` or a script of one's own starts it."""
    return _node_by(env, (NODE, NODES, "MASTER_ADDR", "MASTER_PORT")) if NODE in env else (None, [])


def _pod(env: Mapping[str, str]) -> Found:
    """A pod of Kubernetes: of an Indexed Job or a JobSet as `phalanx launch k8s` writes them (JOB_COMPLETION_INDEX with
    PHALANX_NODES), or of a TrainJob or PyTorchJob of Kubeflow, which sets torchrun's defaults (PET_*)."""
    if "PET_NODE_RANK" in env and AGENT not in env:
        names = ("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    elif "JOB_COMPLETION_INDEX" in env and NODES in env:
        names = ("JOB_COMPLETION_INDEX", NODES, "MASTER_ADDR", "MASTER_PORT")
    else:
        return None, []
    return _node_by(env, names)


def _node_by(env: Mapping[str, str], names: tuple[str, str, str, str]) -> Found:
    """One process for each node. names: the variables with its number, their count, and the first one's host and
    port."""
    number, count, host, port = names
    wanted = names if env.get(count) != "1" else names[:2]
    numbers, problems = _integers(env, number, count, port)
    problems += _absent(env, wanted, names)
    problems = problems or _impossible(number, count, numbers)
    if problems:
        return None, problems
    return LaunchedTask(numbers[number], numbers[count], 0, 1, env.get(host, ""), env.get(port, ""), names), []


def _host_file(env: Mapping[str, str]) -> Found:
    """A process on one of the hosts of a file, one a line: their order is that of the nodes, whatever order a scheduler
    gave them."""
    if HOST_FILE not in env:
        return None, []
    found, problem = number_of(env[HOST_FILE], env)
    if found is None:
        return None, [problem] if problem is not None else []
    if found.tasks is not None and found.tasks != found.count:
        because = {name: env[name] for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", NODES) if name in env}
        rule = f"names {found.count} hosts, and must name the {found.tasks} nodes on which tasks were started"
        return None, [Problem(HOST_FILE, env[HOST_FILE], rule, because, (), WHERE)]
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", ""))
    port = env.get("MASTER_PORT", str(15000 + int(job) % 15000) if job else str(PORT))
    return LaunchedTask(found.number, found.count, 0, 1, env.get("MASTER_ADDR", found.first), port, (HOST_FILE,)), []


# In the order in which they are believed: one that was started inside another comes first.
LAUNCHERS = {
    "a node's number": _node,
    "a host file": _host_file,
    "Open MPI": _open_mpi,
    "Kubernetes": _pod,
    "SLURM": _slurm,
}


def _tcp(host: str, port: str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _weak_secret(env: Mapping[str, str]) -> list[Problem]:
    """A secret that could be guessed is worthless. It is never shown."""
    if SECRET not in env or len(env[SECRET]) >= SHORTEST:
        return []
    rule = f"must have at least {SHORTEST} characters, so that nobody guesses it; `openssl rand -hex 32` makes one"
    return [Problem(SECRET, "(not shown)", rule, {"length": len(env[SECRET])}, (), WHERE)]


def _absent(env: Mapping[str, str], wanted: tuple[str, ...], shown: tuple[str, ...]) -> list[Problem]:
    there = {name: env[name] for name in shown if name in env}
    return [
        Problem(name, None, "must be set where the others are", there, (), WHERE) for name in wanted if name not in env
    ]


def _integers(env: Mapping[str, str], *names: str) -> tuple[dict[str, int], list[Problem]]:
    numbers, problems = {}, []
    for name in names:
        if name in env:
            if env[name].isdigit():
                numbers[name] = int(env[name])
            else:
                problems.append(Problem(name, env[name], "must be an integer >= 0", {}, (), WHERE))
    return numbers, problems


def _impossible(rank: str, size: str, numbers: Mapping[str, int]) -> list[Problem]:
    if rank in numbers and size in numbers and numbers[rank] >= numbers[size]:
        return [Problem(rank, numbers[rank], f"must be < {size}", {size: numbers[size]}, (), WHERE)]
    return []
