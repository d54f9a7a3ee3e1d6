"""Placement: which rank this process is, and where it meets the others. Read from the environment by `launch/env.py` only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """rank of world_size; local_rank counts on this machine. `init_method` is for torch.distributed; a world of one needs none."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    init_method: str = ""
