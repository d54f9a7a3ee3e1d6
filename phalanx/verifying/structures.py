"""Structures of a run on its ranks (what is sharded, shared, uneven, tied or exchanged), in words that `phalanx verify`
reports.

Each is a question about a run and a number of ranks, so that a run and its small copy are asked the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.config.run import Run
from phalanx.forecast.decide import make_plan
from phalanx.layout.grid import Grid
from phalanx.models.experts import RoutingFields
from phalanx.planning.plan import Plan, grid_of
from phalanx.sequence.shard import SequenceShard


@dataclass(frozen=True)
class RunOnRanks:
    """A run on `world` ranks, and the numbers that its structures are read from."""

    run: Run
    world: int

    @cached_property
    def grid(self) -> Grid:
        return grid_of(self.run, self.world)

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.run, self.world)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.run.train.global_batch // (self.run.train.micro_batch * self.grid.dp)

    @property
    def kv_heads(self) -> int:
        model = self.run.model
        return getattr(model, "num_key_value_heads", None) or model.num_attention_heads

    @property
    def ring(self) -> int:
        """Context-parallel ranks that pass keys and values on."""
        return self.grid.cp // self.grid.ulysses

    @property
    def experts(self) -> int:
        return self.run.model.routed_experts

    @property
    def across_data(self) -> bool:
        """Whether ranks with different sequences exchange the tokens of an expert."""
        return self.experts > 0 and self.grid.ep * self.grid.etp > self.grid.tp

    @property
    def expert_groups(self) -> bool:
        """Whether several groups of ranks each hold all experts, sharded within the group."""
        return self.experts > 0 and self.grid.edp > 1 and self.grid.ep * self.grid.etp > 1

    @property
    def groups(self) -> bool:
        """Whether data-parallel ranks shard in several groups."""
        group = self.run.layout.shard_group
        return group is not None and group < self.grid.dp * self.grid.cp

    @property
    def uneven_parts(self) -> bool:
        return len({part.size(self.run.train.seq_length) for part in SequenceShard(0, self.grid.cp).all}) > 1

    @property
    def inner_size(self) -> int:
        """Width of dense MLPs."""
        return self.run.model.intermediate_size or 4 * self.run.model.hidden_size

    @property
    def dense_and_experts(self) -> bool:
        model = self.run.model
        kinds = (
            {model.has_experts(i) for i in range(model.num_hidden_layers)}
            if isinstance(model, RoutingFields)
            else set()
        )
        return len(kinds) > 1

    @property
    def windows(self) -> set[bool]:
        """The distinct answers, over layers, to whether the layer has a window shorter than the sequence."""
        return {window is not None and window < self.run.train.seq_length for window in windows_of(self.run.model)}

    @property
    def beyond_original(self) -> bool:
        """Whether sequences are longer than the context before the rotary embedding was scaled."""
        scaling = getattr(self.run.model, "rope_scaling", None)
        original = None if scaling is None else scaling.original_max_position_embeddings
        return original is not None and self.run.train.seq_length > original

    @property
    def buckets(self) -> int:
        return max(self.plan.segments_per_stage)

    @property
    def shared_buckets(self) -> bool:
        """Whether blocks share one of several buckets."""
        return self.buckets > 1 and any(len(segment) > 1 for stage in self.plan.segments for segment in stage)


def cuts_inside(micro_batch: int, seq_length: int, cp: int, tp: int) -> bool:
    """Whether tensor parallelism, which divides the tokens of a micro-batch evenly, splits a sequence."""
    sizes = {part.size(seq_length) for part in SequenceShard(0, cp).all}
    return any(rank * micro_batch * size // tp % size for size in sizes for rank in range(1, tp))


def holds_several(micro_batch: int, seq_length: int, cp: int, tp: int) -> bool:
    """Whether a tensor-parallel rank has tokens of several sequences."""
    for size in {part.size(seq_length) for part in SequenceShard(0, cp).all}:
        each = micro_batch * size // tp
        if any(rank * each // size != ((rank + 1) * each - 1) // size for rank in range(tp)):
            return True
    return False


def windows_of(model: Any) -> list[int | None]:
    """The window of each layer, None where it reads everything before it."""
    return [model.window(i) for i in range(model.num_hidden_layers)]


@dataclass(frozen=True)
class Structure:
    """`weight`: how much it counts if a small copy cannot have all structures."""

    name: str
    weight: int
    has: Callable[[RunOnRanks], bool]


def _batch(r: RunOnRanks) -> tuple[int, int, int, int]:
    return r.run.train.micro_batch, r.run.train.seq_length, r.grid.cp, r.grid.tp


STRUCTURES = (
    Structure("pipeline stages", 100, lambda r: r.grid.pp > 1),
    Structure("tensor-parallel ranks", 100, lambda r: r.grid.tp > 1),
    Structure("context-parallel ranks", 100, lambda r: r.grid.cp > 1),
    Structure("gradients summed over ranks with other tokens", 100, lambda r: r.grid.dp * r.grid.cp > 1),
    Structure("data-parallel ranks", 40, lambda r: r.grid.dp > 1),
    Structure("three or more data-parallel ranks", 5, lambda r: r.grid.dp > 2),
    Structure("images computed by other data-parallel ranks", 40, lambda r: r.grid.media > 1),
    # ---- micro-batches and sequences
    Structure("a tensor-parallel cut inside a sequence", 50, lambda r: cuts_inside(*_batch(r))),
    Structure(
        "tokens of several sequences on a tensor-parallel rank",
        10,
        lambda r: r.grid.tp > 1 and holds_several(*_batch(r)),
    ),
    Structure("three or more tensor-parallel ranks", 10, lambda r: r.grid.tp > 2),
    Structure("several sequences in a micro-batch", 20, lambda r: r.run.train.micro_batch > 1),
    Structure("several micro-batches", 30, lambda r: r.micro_batches > 1),
    Structure("a micro-batch between the first and the last", 10, lambda r: r.micro_batches > 2),
    Structure("fewer micro-batches than pipeline ranks", 10, lambda r: r.micro_batches < r.grid.pp),
    Structure("a batch that grows", 10, lambda r: r.run.train.rampup is not None),
    Structure("documents inside sequences", 30, lambda r: r.run.data.inside_documents),
    Structure("padding after packed documents", 20, lambda r: r.run.data.is_packed),
    # ---- pipeline
    Structure("a pipeline rank between the first and the last", 25, lambda r: r.grid.pp > 2),
    Structure("several stages on a pipeline rank", 50, lambda r: r.run.layout.virtual_stages > 1),
    Structure("given stages of different sizes", 20, lambda r: len(set(r.run.layout.stages or ())) > 1),
    Structure("embeddings tied over stages", 30, lambda r: r.grid.pp > 1 and _tied(r.run)),
    Structure("multi-token prediction", 30, lambda r: r.run.model.predict_layers > 0),
    # ---- context parallelism
    Structure("keys passed between context-parallel ranks", 40, lambda r: r.ring > 1),
    Structure("a ring of three or more context-parallel ranks", 25, lambda r: r.ring > 2),
    Structure("heads exchanged by context-parallel ranks", 40, lambda r: r.grid.ulysses > 1),
    Structure("heads exchanged by some, keys passed between those", 30, lambda r: r.grid.ulysses > 1 and r.ring > 1),
    Structure("documents assigned to context-parallel ranks by length", 30, lambda r: r.grid.cp > 1 and r.grid.dynamic),
    Structure("context-parallel parts of different lengths", 15, lambda r: r.uneven_parts),
    # ---- attention and widths
    Structure("key-value heads cut over ranks", 30, lambda r: r.kv_heads >= r.grid.tp > 1),
    Structure("key-value heads that ranks share", 30, lambda r: r.kv_heads < r.grid.tp),
    Structure("several key-value heads, each shared by some ranks", 15, lambda r: 1 < r.kv_heads < r.grid.tp),
    Structure("several key-value heads on a rank", 10, lambda r: r.kv_heads // r.grid.tp > 1),
    Structure("grouped query heads", 30, lambda r: r.kv_heads < r.run.model.num_attention_heads),
    Structure("a vocabulary that ranks cannot share evenly", 10, lambda r: r.run.model.vocab_size % r.grid.tp > 0),
    Structure("an MLP that ranks cannot share evenly", 10, lambda r: r.inner_size % r.grid.tp > 0),
    Structure("a window shorter than a sequence", 30, lambda r: True in r.windows),
    Structure("layers with and without a window", 10, lambda r: len(r.windows) > 1),
    Structure("sequences longer than before the rotary embedding was scaled", 10, lambda r: r.beyond_original),
    Structure(
        "dropout",
        30,
        lambda r: max(getattr(r.run.model, "dropout", 0.0), getattr(r.run.model, "attention_dropout", 0.0)) > 0,
    ),
    # ---- experts
    Structure("experts spread over ranks", 60, lambda r: r.experts > 0 and r.grid.ep > 1),
    Structure("experts cut over ranks", 50, lambda r: r.experts > 0 and r.grid.etp > 1),
    Structure("experts' gradients summed over ranks", 30, lambda r: r.experts > 0 and r.grid.edp > 1),
    Structure("several groups of ranks that have all experts", 40, lambda r: r.expert_groups),
    Structure("experts spread over ranks with different sequences", 30, lambda r: r.across_data),
    Structure("several experts on a rank", 20, lambda r: r.experts // r.grid.ep > 1),
    Structure(
        "experts that ranks cannot share evenly",
        10,
        lambda r: r.experts > 0 and r.run.model.expert_size % r.grid.etp > 0,
    ),
    Structure("dense layers beside layers with experts", 20, lambda r: r.dense_and_experts),
    # ---- what data-parallel ranks cut among them
    Structure(
        "optimizer state, gradients or weights cut over ranks",
        40,
        lambda r: r.run.layout.sharding > 0 and r.grid.dp * r.grid.cp > 1,
    ),
    Structure("groups of ranks that shard, with copies on others", 60, lambda r: r.groups),
    Structure(
        "optimizer state cut over such groups", 20, lambda r: r.groups and r.run.layout.shard_across == "optimizer"
    ),
    Structure("several gradient buckets in a stage", 30, lambda r: r.buckets > 1),
    Structure("several blocks in one of several buckets", 5, lambda r: r.shared_buckets),
    Structure("adapters", 20, lambda r: r.run.lora is not None),
    Structure("frozen tensors", 20, lambda r: bool(r.run.train.freeze)),
    Structure("activations on the host", 20, lambda r: r.run.train.offload_layers > 0),
)


def _tied(run: Run) -> bool:
    return getattr(run.model, "tie_word_embeddings", True)
