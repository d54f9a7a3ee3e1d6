"""The `layout` section: where things are computed. It never changes what is computed."""

from __future__ import annotations

import math
from typing import Literal

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Data parallelism gets the remaining ranks: dp = world / (pp * cp * tp). Experts divide the same ranks in their
    own way: edp = dp * cp * tp / (ep * etp)."""

    tp: int = 1
    """Tensor-parallel size: each layer's weights are sharded over this many ranks; activations between blocks are
    sharded along tokens."""
    tp_overlap: Literal["auto", "on", "off"] = "auto"
    """Hide tensor-parallel gathers and scatters in the matmuls through memory shared by the ranks. auto: on GPUs of
    one host; on, off."""
    cp: int = 1
    """Context-parallel size: every sequence is sharded over this many ranks, each with two chunks of it so that
    attention costs all ranks the same."""
    cp_attention: Literal["auto", "ring", "allgather"] = "auto"
    """How a rank's queries read keys and values of other ranks: ring (one rank's at a time, with the next on its way
    meanwhile), allgather (all at once, beforehand). auto: ring, but allgather where attention stays inside documents or
    has dropout."""
    cp_ulysses: int = 1
    """Groups of this many neighbours among the cp ranks exchange heads for tokens (Ulysses), as far as there are
    key-value heads; cp_attention then works between the groups. Set to the value of cp, nothing else is exchanged."""
    cp_degree: Literal["fixed", "dynamic"] = "fixed"
    """How many of the cp ranks share a document. fixed: all; dynamic: as few as its length needs, chosen for each
    micro-batch."""
    ep: int = 1
    """Expert-parallel size: the experts of each layer are spread over this many ranks of a stage; it may span tp, cp
    and dp."""
    etp: int = 1
    """Tensor-parallel size inside each expert, independent of tp."""
    dispatch: Literal["auto", "allgather", "alltoall", "push"] = "auto"
    """How tokens travel to their experts: allgather (every token to every expert rank), push (each token to its
    experts' ranks through memory that they share), alltoall (the same by messages; the host waits for their sizes in
    each layer). auto: allgather while ep * etp <= experts per token, else push on GPUs of one host, else alltoall."""
    ep_overlap: Literal["auto", "on", "off"] = "auto"
    """allgather: exchange tokens through memory shared by the ranks, overlapped with the router and weight gradients.
    auto: on GPUs of one host; on, off."""
    expert_room: float = 2.0
    """allgather, push: tokens that an expert rank has room for, as a multiple of its fair share. A step for which that
    is not enough runs again with alltoall."""
    pp: int = 1
    """Pipeline-parallel size: number of ranks that the layers are spread over."""
    virtual_stages: int = 1
    """Model chunks per pipeline rank (interleaved schedules)."""
    schedule: str = "auto"
    """Pipeline schedule: gpipe, 1f1b, interleaved (with virtual_stages > 1), zb_h1 (zero bubble: 1f1b whose weight
    gradients fill its idle times), or one of your own as PACKAGE.MODULE:NAME. auto: 1f1b, or interleaved when
    virtual_stages > 1."""
    stages: tuple[int, ...] | None = None
    """Blocks per stage (embedding and head are blocks too), pp * virtual_stages numbers; unset: divided by cost."""
    sharding: Literal[0, 1, 2, 3] = 1
    """What data-parallel ranks shard (ZeRO stage). 0: nothing; 1: optimizer state; 2: gradients too, reduced after each
    micro-batch; 3: weights too (FSDP), gathered for each segment of blocks and freed after it."""
    shard_group: int | None = None
    """Shard over this many neighbouring data-parallel ranks (such as those of a node) and replicate over the others
    (HSDP); unset: shard over all of them."""
    shard_across: Literal["nothing", "optimizer"] = "nothing"
    """With shard_group: what is also sharded over the groups instead of being replicated in each. optimizer: its
    state."""
    dp_overlap: Literal["auto", "on", "off"] = "auto"
    """Bring weights to data-parallel ranks, and gradients to the rank that sums them, by copies through memory that the
    ranks share, which take no multiprocessors from the matmuls that run meanwhile. auto: with sharding 2 and 3 (with 1
    they were not found to be faster), on GPUs of one host; on; off."""
    prefetch: int = 1
    """With sharding 2 and 3: how many segments before its use a weight is gathered, and for how many after its backward
    a gradient may still travel."""
    reshard_after_forward: bool = True
    """With sharding 3: free gathered weights after each forward and gather them again for the backward. false: keep
    them until the step's last use."""
    media_group: int | None = None
    """Images are assigned, each whole, to the ranks of tp and cp of this many neighbouring data-parallel ranks together
    (such as those of a node), by their patches. Unset: of all of them, or of as many as have 64 ranks together. 1: each
    data-parallel rank computes its own images, however large."""
    bucket_mb: int = 100
    """Gradients are reduced in buckets of about this many MiB, while backward still runs."""

    @property
    def least_ranks(self) -> int:
        """The smallest world that the layout fits: one data-parallel rank, or as many as the experts' sizes need."""
        return max(1, self.pp * math.lcm(self.tp * self.cp, self.ep * self.etp))

    @property
    def dp_copies(self) -> Literal["auto", "on", "off"]:
        """dp_overlap, with `auto` resolved as far as `sharding` determines it."""
        return "off" if self.dp_overlap == "auto" and self.sharding < 2 else self.dp_overlap
