"""The world once more, for threads that talk beside the training: on gloo, so that nothing of theirs waits for a device or for a step."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from phalanx.comm.axis import Axis


def host_axis(world: Axis, timeout_s: float) -> Axis:
    """All ranks of the world, with a communicator of their own. Called by all of them together; one thread of each rank uses it at a time."""
    if world.size == 1:
        return world
    group = dist.new_group(list(world.ranks), timeout=timedelta(seconds=timeout_s), backend="gloo", group_desc="host")
    return Axis("host", world.ranks, world.index, group)
