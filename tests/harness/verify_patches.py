"""Errors to plant in layouts: small patches of Phalanx, each with a run whose layout it makes wrong.

Each is an error that one process does not have: it is planted only where a layout of several ranks is computed.
tests/verifying/test_verify.py shows that each changes what its own run computes, and that `phalanx verify` finds it in
the small copies of that run and of a larger one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.data_parallel import flat as flat_module
from phalanx.data_parallel.buffers import Buffers
from phalanx.data_parallel.flat import FlatBucket
from phalanx.engine import step
from phalanx.layout.config import LayoutConfig
from phalanx.layout.param import Replica
from phalanx.models import layer_norm_decoder
from phalanx.nn import attention as attention_module
from phalanx.nn import linear_method, moe, mtp
from phalanx.nn.rotary import Rotary
from phalanx.ops.attention import context
from phalanx.ops.dense import cross_entropy
from phalanx.ops.dense.dropout import dropout_mask
from phalanx.ops.dense.embedding import learned_positions
from phalanx.ops.experts import route
from phalanx.pipeline.execute import Stages
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.verifying import compare
from tests.harness.parity import base_run

Change = tuple[Any, str, Any]
"""(object, name of an attribute, what it is to be)"""


@dataclass(frozen=True)
class Planted:
    """An error and a run of `world` ranks that has it. `world` is at most 8, so that the run itself can be compared
    with one process."""

    make: Callable[[], list[Change]]
    model: str
    world: int
    micro_batch: int = 1
    count: int = 3  # micro-batches of a rank in a step
    documents: bool = False
    packed: bool = False
    model_changes: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)

    def run(self, world: int, layout: LayoutConfig) -> Run:
        dp = world // (layout.pp * layout.cp * layout.tp)
        base = base_run(self.model, global_batch=self.count * self.micro_batch * dp, micro_batch=self.micro_batch)
        data = DataConfig(
            mock=True, packing="online" if self.packed else "off", document_attention=self.documents or None
        )
        return replace(base, model=replace(base.model, **self.model_changes), layout=layout, data=data)

    @property
    def own(self) -> tuple[Run, int]:
        return self.run(self.world, LayoutConfig(**self.layout)), self.world

    @property
    def larger(self) -> tuple[Run, int]:
        """The same with a pipeline and more data-parallel ranks: verify has to make it smaller."""
        layout = LayoutConfig(**self.layout)
        pp = max(2, layout.pp)
        return self.run(self.world // layout.pp * pp * 8, replace(layout, pp=pp)), self.world // layout.pp * pp * 8


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The error in every layout of several ranks that `verify.follow` computes meanwhile."""
    real = compare.follow

    def follow(run: Run, mesh: Mesh, steps: int, drop: Any = None) -> Any:
        with ExitStack() as stack:
            for where, attribute, value in PLANTED[name].make() if mesh.grid.world > 1 else ():
                stack.enter_context(mock.patch.object(where, attribute, value))
            return real(run, mesh, steps, drop)

    with mock.patch.object(compare, "follow", follow):
        yield


# ---- positions -----------------------------------------------------------------------------------


def learned_positions_of_rank_0() -> list[Change]:
    def forward(self: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        a, b = self.env.cut(batch.num_tokens)
        x = self.embed(batch.tokens) + learned_positions(batch.positions[: b - a], self.positions)
        return self.drop(x, batch, self.p, 0, 1)

    return [(layer_norm_decoder.LearnedEmbedding, "forward", forward)]


def dropout_by(places_of_rank_0: bool, samples_of_rank_0: bool) -> list[Change]:
    def drop(self: Any, x: torch.Tensor, batch: Batch, p: float, layer: int, site: int) -> torch.Tensor:
        a, b = self.env.cut(batch.num_tokens)
        samples = batch.samples[: b - a] if samples_of_rank_0 else batch.samples[a:b]
        places = batch.places[: b - a] if places_of_rank_0 else batch.places[a:b]
        return x * dropout_mask(p, self.env.seed, layer, site, (samples, places), x.shape[-1], x.dtype)

    return [(layer_norm_decoder.Dropping, "drop", drop)]


def places_inside_the_part() -> list[Change]:
    return [(Batch, "places", property(lambda batch: torch.arange(batch.length).repeat(batch.num_sequences)))]


def rotary_with(positions: Callable[[Batch], torch.Tensor]) -> list[Change]:
    real = Rotary.table

    def table(self: Rotary, batch: Batch, dtype: torch.dtype) -> Any:
        return real(self, replace(batch, positions=positions(batch), _made={}), dtype)

    return [(Rotary, "table", table)]


def local_rotary() -> list[Change]:
    return rotary_with(lambda batch: torch.arange(batch.length).repeat(batch.num_sequences))


def rotary_one_too_far_on_the_last_part() -> list[Change]:
    return rotary_with(lambda batch: batch.positions + int(batch.part.index == batch.part.count - 1))


def learned_positions_across_documents() -> list[Change]:
    def forward(self: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        a, b = self.env.cut(batch.num_tokens)
        x = self.embed(batch.tokens) + learned_positions(batch.places[a:b], self.positions)
        return self.drop(x, batch, self.p, 0, 1)

    return [(layer_norm_decoder.LearnedEmbedding, "forward", forward)]


def heads_of_rank_0_in_dropout() -> list[Change]:
    real = context.attention_with_dropout
    return [(context, "attention_with_dropout", lambda *args: real(*args[:-1], replace(args[-1], first_head=0)))]


# ---- sums over ranks -----------------------------------------------------------------------------


def sums_over(axis_name: str, times: float | None) -> list[Change]:
    """Sums over an axis are left out (None), or come out so many times too large."""
    real = flat_module.sum_together

    def sum_together(axis: Any, views: list[torch.Tensor]) -> None:
        if axis.name != axis_name:
            real(axis, views)
        elif times is not None:
            real(axis, views)
            for view in views:
                view.mul_(times)

    return [(flat_module, "sum_together", sum_together)]


def heads_of_other_groups() -> list[Change]:
    """Ranks take turns with key-value heads instead of sharing them with their neighbours."""
    real = attention_module.Heads.of

    def of(env: Any, heads: int, kv_heads: int) -> Any:
        tp = env.grid.tp
        if kv_heads >= tp:
            return real(env, heads, kv_heads)
        k = env.at.tp % kv_heads
        return attention_module.Heads(*env.cut(heads), k, k + 1, (Replica("tp", tuple(range(k, tp, kv_heads))),))

    return [(attention_module.Heads, "of", staticmethod(of))]


def replicas_counted_twice() -> list[Change]:
    return [(FlatBucket, "counted", lambda self: [self._grads(*self.own)] if self.training else [])]


def norm_of_this_rank() -> list[Change]:
    def grad_norm(self: Buffers) -> torch.Tensor:
        return torch.stack([v.double().square().sum() for f in self.flat for v in f.counted()]).sum().sqrt()

    return [(Buffers, "grad_norm", grad_norm)]


def nothing_between_groups() -> list[Change]:
    real = FlatBucket._share
    return [(FlatBucket, "_share", lambda self: None if self.groups.outer.size > 1 else real(self))]


def last_micro_batch_alone() -> list[Change]:
    def close(self: FlatBucket, last: bool) -> None:
        summed = self._reducing.wait()
        self._reducing = None
        self.grad_kept.copy_(summed)
        if last:
            self._share()

    return [(FlatBucket, "close", close)]


def weights_of_others_stay() -> list[Change]:
    return [(FlatBucket, "gather_parts", lambda self: None)]


def bias_on_rank_0_alone(function: str) -> list[Change]:
    real = getattr(linear_method, function)
    return [
        (
            linear_method,
            function,
            lambda x, weight, tp, bias=None: real(x, weight, tp, bias if tp.index == 0 else None),
        )
    ]


def padding_of_the_vocabulary() -> list[Change]:
    def stats(logits: torch.Tensor, rows: torch.Tensor, here: torch.Tensor, columns: object) -> torch.Tensor:
        label = torch.where(here, logits.gather(1, rows.unsqueeze(-1))[:, 0], 0)
        return torch.stack((torch.logsumexp(logits, -1), label))

    return [(cross_entropy, "softmax_stats", stats)]


# ---- what a token counts -------------------------------------------------------------------------


def tokens_of(count: Callable[[Any, torch.Tensor], torch.Tensor]) -> list[Change]:
    def count_tokens(state: Any, batches: Any) -> torch.Tensor:
        return count(state, torch.stack([(b.labels != IGNORE).sum() for b in batches]).sum().double())

    return [(step, "count_tokens", count_tokens)]


def mean_over_data_parallel_ranks() -> list[Change]:
    return tokens_of(lambda state, mine: state.mesh.cp.all_reduce(mine).wait() * state.mesh.dp.size)


def mean_over_parts() -> list[Change]:
    return tokens_of(lambda state, mine: state.mesh.dp.all_reduce(mine).wait() * state.mesh.cp.size)


def seeds(seed: Callable[[torch.Tensor, int, list[Batch]], torch.Tensor]) -> list[Change]:
    """Other gradients of the summed loss: seed(the right one, number of the micro-batch, all of them)."""
    real = Stages.begin

    def begin(self: Stages, batches: Any, given: Any = None, **named: Any) -> None:
        real(self, batches, named.get("seed", given))
        if self.seed is not None:
            self.batches = [replace(b, loss_seed=seed(self.seed, i, self.batches)) for i, b in enumerate(self.batches)]

    return [(Stages, "begin", begin)]


def mean_over_micro_batches() -> list[Change]:
    def seed(right: torch.Tensor, i: int, batches: list[Batch]) -> torch.Tensor:
        tokens = torch.stack([(b.uncut.labels != IGNORE).sum() for b in batches]).double()
        return right * tokens.mean() / tokens[i]

    return seeds(seed)


def last_micro_batch_lost() -> list[Change]:
    return seeds(lambda right, i, batches: right * (i < len(batches) - 1))


def middle_micro_batches_twice() -> list[Change]:
    return seeds(lambda right, i, batches: right * (2 if 0 < i < len(batches) - 1 else 1))


# ---- pipeline ------------------------------------------------------------------------------------


def stages_not_summed() -> list[Change]:
    return [(FlatBucket, "sum_stages", lambda self: None)]


def middle_ranks_send_twice_as_much() -> list[Change]:
    real = Stages.send

    def send(self: Stages, i: Any) -> None:
        if 0 < self.mesh.at.pp < self.mesh.grid.pp - 1:
            self._values[i.value] = tuple(2 * value for value in self._values[i.value])
        real(self, i)

    return [(Stages, "send", send)]


def virtual_stages_in_another_order() -> list[Change]:
    """The layers of a rank's stages are computed in the other order."""
    real = Stages._compute

    def compute(self: Stages, where: Any, xs: Any, batch: Batch, offloaded: Any = None) -> Any:
        layers = [
            at
            for at, blocks in sorted(self.segments.items())
            if len(blocks) == 1 and type(blocks[0]).__name__.endswith("Layer")
        ]
        swapped = dict(zip(layers, reversed(layers)))
        segments, self.segments = self.segments, {at: self.segments[swapped.get(at, at)] for at in self.segments}
        try:
            return real(self, where, xs, batch, offloaded)
        finally:
            self.segments = segments

    return [(Stages, "_compute", compute)]


def bias_of_choice_stays_on_later_ranks() -> list[Change]:
    real = moe.MoE.settle
    return [
        (
            moe.MoE,
            "settle",
            lambda self, counts, skip: real(self, counts, skip if self.env.at.pp == 0 else torch.ones_like(skip)),
        )
    ]


def shifted_inside_the_part() -> list[Change]:
    def shifted(batch: Batch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.arange(batch.num_tokens)
        further = torch.where(place % batch.length < batch.length - k, place + k, place)
        return batch.tokens[further], torch.where(further > place, batch.labels[further], IGNORE)

    return [(mtp, "shifted", shifted)]


# ---- context parallelism -------------------------------------------------------------------------


def masks(change: Callable[[Batch, int | None], tuple[Batch, int | None]]) -> list[Change]:
    """Other masks for the keys of other parts."""
    real = context._make_mask

    def make(batch: Batch, source: Any, block: Any, window: int | None, dtype: torch.dtype) -> Any:
        if source != batch.part:
            batch, window = change(batch, window)
        return real(batch, source, block, window, dtype)

    return [(context, "_make_mask", make)]


def wider_window_over_the_cut() -> list[Change]:
    return masks(lambda batch, window: (batch, None if window is None else window + 1))


def documents_end_at_no_cut() -> list[Change]:
    return masks(lambda batch, window: (replace(batch, documents=None, _made={}), window))


def keys_of_the_rank_on_the_other_side() -> list[Change]:
    real = context.KeyValueGather.arrivals

    def arrivals(self: Any) -> Any:
        here, size = self.axis.index, self.axis.size
        found = dict(real(self))
        for source, kv in found.items():
            other = found[(2 * here - source) % size]
            yield source, other if other.shape == kv.shape else kv * 0

    return [(context.KeyValueGather, "arrivals", arrivals)]


def sinks_of_other_heads() -> list[Change]:
    def own_heads(x: torch.Tensor, axis: Any) -> torch.Tensor:
        return x if axis.size == 1 else context._OwnHeads.apply(x.flip(0), axis)

    return [(context, "own_heads", own_heads)]


# ---- experts -------------------------------------------------------------------------------------


def other_experts_in_the_second_group(features: bool) -> list[Change]:
    """In all groups of ranks but the first, ranks hold the experts (or the features of experts) of their neighbours."""

    def of(env: Any, count: int, width: int, inner: int) -> Any:
        at, grid = env.grid.expert_coords(env.at), env.grid
        ep = (at.ep + (at.edp > 0 and not features)) % grid.ep
        etp = (at.etp + (at.edp > 0 and features)) % grid.etp
        return moe.ExpertShard(range(*moe.cut(count, grid.ep)[ep]), *moe.cut(inner, grid.etp)[etp], count, width, inner)

    return [(moe.ExpertShard, "of", staticmethod(of))]


def balance_of_this_rank() -> list[Change]:
    real = route.balance_loss
    return [(route, "balance_loss", lambda local, total=None: real(local))]


def balance_weighs_the_part() -> list[Change]:
    def weight(batch: Batch, objective: Any) -> torch.Tensor:
        tokens = (batch.labels != IGNORE).sum() * batch.part.count
        return tokens if batch.loss_seed is None else tokens * batch.loss_seed

    return [(moe, "loss_weight", weight)]


def balance_of_one_sequence() -> list[Change]:
    real = route.balance_sums

    def sums(
        choice: Any, sequence: torch.Tensor | None = None, sequences: int = 1, real_T: torch.Tensor | None = None
    ) -> Any:
        return real(choice, None if sequence is None else torch.zeros_like(sequence), sequences, real_T)

    return [(route, "balance_sums", sums)]


def padding_of_rank_0() -> list[Change]:
    def real_tokens(self: Any, batch: Batch) -> torch.Tensor | None:
        return None if batch.real is None else batch.real[: len(batch.real) // self.env.tp.size]

    return [(moe.MoE, "_real", real_tokens)]


PLANTED = {
    "learned positions of rank 0 on every tp rank": Planted(
        learned_positions_of_rank_0, "gpt2", 4, 2, layout=dict(tp=4)
    ),
    "dropout by places of rank 0 on every tp rank": Planted(
        lambda: dropout_by(True, False), "gpt2", 4, 2, layout=dict(tp=4)
    ),
    "dropout by samples of rank 0 on every tp rank": Planted(
        lambda: dropout_by(False, True), "gpt2", 4, 2, layout=dict(tp=4)
    ),
    "dropout by places inside the cp part": Planted(places_inside_the_part, "gpt2", 4, layout=dict(cp=4)),
    "dropout of attention by head numbers of a tp rank": Planted(
        heads_of_rank_0_in_dropout, "gpt2", 4, layout=dict(tp=4)
    ),
    "rotary angles by places inside the cp part": Planted(local_rotary, "llama", 4, layout=dict(cp=4)),
    "rotary angles one place on, on the last cp part": Planted(
        rotary_one_too_far_on_the_last_part, "qwen3", 8, layout=dict(cp=4, tp=2)
    ),
    "learned positions that run on through documents": Planted(
        learned_positions_across_documents, "gpt2", 4, documents=True, layout=dict(cp=2)
    ),
    "norms' gradients not summed over tp": Planted(lambda: sums_over("tp", None), "llama", 4, 2, layout=dict(tp=4)),
    "shared key-value heads' gradients summed twice": Planted(
        lambda: sums_over("tp part", 2.0), "llama", 4, layout=dict(tp=4)
    ),
    "key-value heads of another group of tp ranks": Planted(heads_of_other_groups, "llama", 4, layout=dict(tp=4)),
    "replicas counted twice in the gradient norm": Planted(replicas_counted_twice, "mistral", 4, layout=dict(tp=2)),
    "gradient norm of a rank alone": Planted(norm_of_this_rank, "llama", 4, layout=dict(tp=2, pp=2)),
    "shard groups that do not sum among them": Planted(
        nothing_between_groups, "llama", 8, layout=dict(sharding=3, shard_group=2)
    ),
    "ZeRO-2 keeps the last micro-batch's gradient alone": Planted(
        last_micro_batch_alone, "llama", 4, layout=dict(sharding=2)
    ),
    "ZeRO-1 does not gather the weights of others": Planted(weights_of_others_stay, "llama-tied", 4, layout=dict()),
    "qkv bias on tp rank 0 alone": Planted(
        lambda: bias_on_rank_0_alone("gather_matmul"), "qwen2", 4, layout=dict(tp=4)
    ),
    "output bias on tp rank 0 alone": Planted(
        lambda: bias_on_rank_0_alone("matmul_scatter"), "gpt2", 4, layout=dict(tp=4)
    ),
    "padding rows of the vocabulary in the loss": Planted(padding_of_the_vocabulary, "llama", 2, layout=dict(tp=2)),
    "mean over data-parallel ranks instead of tokens": Planted(
        mean_over_data_parallel_ranks, "llama", 4, count=5, layout=dict()
    ),
    "mean over cp parts instead of tokens": Planted(mean_over_parts, "llama", 4, layout=dict(cp=2)),
    "mean over micro-batches instead of tokens": Planted(
        mean_over_micro_batches, "mistral", 2, count=5, layout=dict(pp=2)
    ),
    "the last micro-batch lost": Planted(last_micro_batch_lost, "gpt2", 4, count=4, layout=dict(pp=2)),
    "middle micro-batches twice": Planted(middle_micro_batches_twice, "llama", 4, count=5, layout=dict(pp=4)),
    "tied embeddings' gradient not summed over stages": Planted(stages_not_summed, "llama-tied", 4, layout=dict(pp=4)),
    "middle pipeline ranks send twice as much": Planted(middle_ranks_send_twice_as_much, "llama", 4, layout=dict(pp=4)),
    "layers of virtual stages in another order": Planted(
        virtual_stages_in_another_order, "llama-tied", 2, layout=dict(pp=2, virtual_stages=2, bucket_mb=0)
    ),
    "the bias of choice stays on later pipeline ranks": Planted(
        bias_of_choice_stays_on_later_ranks, "deepseek_v3", 2, layout=dict(pp=2)
    ),
    "MTP shifted inside the cp part": Planted(shifted_inside_the_part, "deepseek_v3-mtp", 2, layout=dict(cp=2)),
    "a window one wider over the cp cut": Planted(wider_window_over_the_cut, "mistral", 4, layout=dict(cp=4)),
    "documents that run on over the cp cut": Planted(
        documents_end_at_no_cut, "mistral", 4, documents=True, layout=dict(cp=4)
    ),
    "keys of the cp rank on the other side": Planted(
        keys_of_the_rank_on_the_other_side, "llama", 4, layout=dict(cp=4, cp_attention="allgather")
    ),
    "sinks of other heads where heads are exchanged": Planted(
        sinks_of_other_heads, "gpt_oss", 4, layout=dict(cp=2, cp_ulysses=2)
    ),
    "other experts in the second group of ranks": Planted(
        lambda: other_experts_in_the_second_group(False), "mixtral", 8, layout=dict(ep=4)
    ),
    "other features of experts in the second group": Planted(
        lambda: other_experts_in_the_second_group(True), "gpt_oss", 4, layout=dict(etp=2, sharding=0)
    ),
    "a balancing loss of each rank": Planted(balance_of_this_rank, "mixtral", 4, 2, layout=dict(tp=4, ep=2)),
    "a balancing loss weighed by the cp part": Planted(balance_weighs_the_part, "mixtral", 2, layout=dict(cp=2)),
    "a balancing loss of one sequence": Planted(balance_of_one_sequence, "qwen3_moe", 4, 2, layout=dict(tp=2, ep=2)),
    "padding of tp rank 0 on every rank": Planted(padding_of_rank_0, "mixtral", 4, packed=True, layout=dict(tp=4)),
}
