"""How tokens get to their experts, and how much room they have there."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config.run import Run
from phalanx.layout.grid import Grid
from phalanx.ops.experts.exchange import Dispatch, room_for

ONE_HOST = 8  # GPUs that share memory, as far as can be known before they meet


@dataclass(frozen=True)
class ExpertsPlan:
    """Decisions and facts of layers with experts; without experts nothing is exchanged.

    dispatch         how tokens travel; on ranks that turn out to share no memory, an automatic push becomes all-to-all
    in_memory        they travel through memory that the ranks share, where they do (GPUs of one host)
    exchange_bytes   of a micro-batch's activations of one rank, gathered over ep and etp
    room_may_lack    an expert rank could get more tokens than layout.expert_room allows it
    rows_filled      the part of the rows that an expert rank has room for which is computed while the load is even:
                     kernels go no further
    waits_for_sizes  the host waits, in every layer, for the number of tokens that go to each rank
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
    """most_tokens: of a micro-batch, on the ranks that have the largest part of it; exchange_bytes: of its activations
    between blocks."""
    dispatch, routed = dispatch_of(run), run.model.routed_experts
    room_may_lack, rows_filled = False, 1.0
    if routed and dispatch != "alltoall":
        tokens = most_tokens // grid.tp * grid.ep * grid.etp  # those that the ranks of a layer's experts have together
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
    """Of T tokens over n ranks all-gather sends (n - 1) T, from before the router; push sends (n - 1) T (1 - C(E -
    E/ep, K) / C(E, K)), from after it: little less while n <= K."""
    ranks = run.layout.ep * run.layout.etp
    if run.layout.dispatch != "auto":
        return run.layout.dispatch
    if ranks <= getattr(run.model, "num_experts_per_tok", 0):
        return "allgather"
    return "push" if ranks <= ONE_HOST and run.train.device != "cpu" else "alltoall"
