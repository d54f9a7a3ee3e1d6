"""The environment of a process: which rank torchrun or SLURM made it, and how ranks meet. Starts nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from phalanx.base.errors import Problem
from phalanx.base.placement import SECRET, Placement
from phalanx.training.machine import describe_machine

__all__ = ["Placement", "describe_machine", "first_host", "read_placement"]

SHORTEST = 16  # characters of a run's secret
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def read_placement(env: Mapping[str, str]) -> tuple[Placement | None, list[Problem]]:
    """This process's place in a world that someone else started, or None if it is to start its own; and any
    problems."""
    if "RANK" in env or "WORLD_SIZE" in env:
        placement, problems = _from_torchrun(env)
        return _with_local_size(placement, env.get("LOCAL_WORLD_SIZE", "")), problems
    if "SLURM_PROCID" in env and ("SLURM_STEP_ID" in env or "SLURM_STEPID" in env):
        placement, problems = _from_slurm(env)  # without a step it is the batch script itself, of which there is one
        return _with_local_size(
            placement, tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), env.get("SLURM_NODEID", ""))
        ), problems
    return None, []


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
    absent = [name for name in wanted if name not in env]
    there = {name: env[name] for name in TORCHRUN if name in env}
    problems = [
        Problem(name, None, "must be set where the others are", there, (), "the environment") for name in absent
    ]
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


def _from_slurm(env: Mapping[str, str]) -> tuple[Placement | None, list[Problem]]:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    numbers, problems = _integers(env, "SLURM_PROCID", size, "SLURM_LOCALID", "MASTER_PORT")
    problems += _weak_secret(env)
    there = {name: env[name] for name in ("SLURM_PROCID", size, "SLURM_LOCALID") if name in env}
    problems += [
        Problem(n, None, "must be set where the others are", there, (), "the environment")
        for n in (size, "SLURM_LOCALID")
        if n not in env
    ]
    problems = problems or _impossible("SLURM_PROCID", size, numbers)
    if not problems and numbers[size] > 1 and not (nodes or "MASTER_ADDR" in env):
        problems = [
            Problem(
                "SLURM_NODELIST",
                None,
                "must be set (or MASTER_ADDR), to know where rank 0 is",
                there,
                (),
                "the environment",
            )
        ]
    if problems:
        return None, problems
    if numbers[size] == 1:
        return Placement(0, numbers["SLURM_LOCALID"], 1, local_size=1), []
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or "0"
    port = env.get("MASTER_PORT", str(15000 + int(job) % 15000))
    address = env.get("MASTER_ADDR") or first_host(nodes)
    return Placement(
        numbers["SLURM_PROCID"], numbers["SLURM_LOCALID"], numbers[size], _tcp(address, port), env.get(SECRET, "")
    ), []


def _tcp(host: str, port: str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _weak_secret(env: Mapping[str, str]) -> list[Problem]:
    """A secret that could be guessed is worthless. It is never shown."""
    if SECRET not in env or len(env[SECRET]) >= SHORTEST:
        return []
    rule = f"must have at least {SHORTEST} characters, so that nobody guesses it; `openssl rand -hex 32` makes one"
    return [Problem(SECRET, "(not shown)", rule, {"length": len(env[SECRET])}, (), "the environment")]


def _integers(env: Mapping[str, str], *names: str) -> tuple[dict[str, int], list[Problem]]:
    numbers, problems = {}, []
    for name in names:
        if name in env:
            if env[name].isdigit():
                numbers[name] = int(env[name])
            else:
                problems.append(Problem(name, env[name], "must be an integer >= 0", {}, (), "the environment"))
    return numbers, problems


def _impossible(rank: str, size: str, numbers: Mapping[str, int]) -> list[Problem]:
    if rank in numbers and size in numbers and numbers[rank] >= numbers[size]:
        return [Problem(rank, numbers[rank], f"must be < {size}", {size: numbers[size]}, (), "the environment")]
    return []


def first_host(nodes: str) -> str:
    """`gpu[03-07,9],x1` -> `gpu03`: the first name of a SLURM list."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return f"{found[1]}{found[2] or ''}{found[3] or ''}" if found else nodes
