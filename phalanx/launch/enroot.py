"""Containers of SLURM's plugin pyxis: what the hook of their runtime enroot adds to the environment of images that hold
PyTorch, and what of it is to be believed.

The hook (50-slurm-pytorch.sh) gives each task the numbers of SLURM as those of a rank. That hides that a task may be
the one of its node that starts the node's ranks. It also takes the first host of SLURM's list for that of rank 0,
whatever order a host file gives the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.layout.positions import BadPositions, expand_hosts

IMAGE = "PYTORCH_VERSION"  # which images of PyTorch set, and for which the hook looks
NUMBERS = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
FIRST_PORT, PORTS = 61000, 4536  # of which the hook takes one by the job's number


def without_hook(env: Mapping[str, str]) -> Mapping[str, str]:
    """The environment less what the hook has added; what somebody else has set stays."""
    job = env.get("SLURM_JOB_ID", "")
    if IMAGE not in env or not job.isdigit() or any(env.get(name) != env.get(of) for name, of in NUMBERS.items()):
        return env
    added = set(NUMBERS)
    if env.get("MASTER_PORT") == str(FIRST_PORT + int(job) % PORTS):
        added.add("MASTER_PORT")
        if env.get("MASTER_ADDR") == first_of(env.get("SLURM_STEP_NODELIST", "")):
            added.add("MASTER_ADDR")
    return {name: value for name, value in env.items() if name not in added}


def first_of(nodes: str) -> str:
    try:
        return next(iter(expand_hosts(nodes)), "")
    except BadPositions:
        return ""
