"""How tokens travel to their experts, and how many rows the experts' ranks have room for."""

from __future__ import annotations

from phalanx.base.dataclass import dataclass
from phalanx.config.run import Run
from phalanx.layout.grid import Grid
from phalanx.ops.experts.exchange import Dispatch, room_for

ONE_HOST = 8  # GPUs that share memory, as far as can be known before the ranks meet


@dataclass(frozen=True)
class ExpertsPlan:
    """Decisions and facts about layers with experts. Without experts nothing is exchanged.

    dispatch         how tokens travel; if the ranks turn out to share no memory, an automatic push becomes all-to-all
    in_memory        tokens travel through memory that the ranks share, where they share any (GPUs of one host)
    exchange_bytes   activations of one micro-batch on one rank, gathered over ep and etp
    room_may_lack    an expert rank could receive more tokens than layout.expert_room provides for
    rows_filled      under even load, the fraction of an expert rank's rows that is in use; kernels skip the rest
    waits_for_sizes  in every layer the host waits for the number of tokens that go to each rank
    mixes_batches    ranks with different micro-batches exchange tokens
    """

    dispatch: Dispatch
    in_memory: bool
    exchange_bytes: int
    room_may_lack: bool
    rows_filled: float
    waits_for_sizes: bool
    mixes_batches: bool


def experts_plan(run: Run, grid: Grid, most_tokens: int, exchange_bytes: int) -> ExpertsPlan:
    """most_tokens: tokens of a micro-batch on the ranks with the largest shard of it; exchange_bytes: its activations
    between blocks."""
    dispatch, routed = dispatch_of(run), run.model.routed_experts
    room_may_lack, rows_filled = False, 1.0
    if routed and dispatch != "alltoall":
        tokens = most_tokens // grid.tp * grid.ep * grid.etp  # tokens of all ranks that hold one layer's experts
        slots: int = run.model.num_experts_per_tok  # type: ignore[attr-defined]
        given, worst = room_for(tokens, slots, grid.ep, routed // grid.ep, run.layout.expert_room)
        room_may_lack, rows_filled = given < worst, min(1.0, tokens * slots / grid.ep / given)
    return ExpertsPlan(
        dispatch=dispatch,
        in_memory=dispatch == "push" or (dispatch == "allgather" and run.layout.ep_overlap != "off"),
        exchange_bytes=exchange_bytes // grid.tp * grid.ep * grid.etp,
        room_may_lack=room_may_lack,
        rows_filled=rows_filled,
        waits_for_sizes=routed > 0 and dispatch == "alltoall",
        mixes_batches=routed > 0 and grid.ep * grid.etp > grid.cp * grid.tp,
    )


def dispatch_of(run: Run) -> Dispatch:
    """layout.dispatch, or how `auto` is decided.

    For T tokens over n ranks, all-gather sends (n - 1) T and can start before the router has run. Push sends
    (n - 1) T (1 - C(E - E/ep, K) / C(E, K)) after the router: hardly less while n <= K.
    """
    ranks = run.layout.ep * run.layout.etp
    if run.layout.dispatch != "auto":
        return run.layout.dispatch
    if ranks <= getattr(run.model, "num_experts_per_tok", 0):
        return "allgather"
    return "push" if ranks <= ONE_HOST and run.train.device != "cpu" else "alltoall"
