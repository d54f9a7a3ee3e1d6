"""A second world communicator, for threads that communicate beside training: on gloo, so that they wait for no device
and no step."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx.base.errors import PeerLost
from phalanx.comm.axis import Axis

# set_timeout became public in torch 2.15, where the older name warns.
set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


def host_axis(world: Axis, meet_s: float, wait_s: float) -> Axis:
    """All ranks of the world, with a separate communicator. All of them call it together; only one thread of each rank
    uses it at a time.

    meet_s, wait_s   seconds that ranks wait for each other to create it, and then in each agreement
    """
    if world.size == 1:
        return world
    try:
        group = dist.new_group(list(world.ranks), timeout=timedelta(seconds=meet_s), backend="gloo", group_desc="host")
    except (RuntimeError, dist.DistError) as error:
        raise PeerLost(f"ranks could not meet to write checkpoints, so one of them died: {error}") from error
    set_timeout(timedelta(seconds=wait_s), group)
    return Axis("host", world.ranks, world.index, group)
