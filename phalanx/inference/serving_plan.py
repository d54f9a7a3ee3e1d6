"""The forecast of generation, before anything runs: bytes by kind on each rank, sequences that fit
on a device, and tokens per second that its memory bandwidth allows.

Bytes follow from what the layers declare that they keep (nn.memory.PageSpec) and from the numbers by which the engine
allocates (inference.memory), so both agree to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from phalanx.base.dataclass import dataclass
from phalanx.base.devices import Device
from phalanx.base.dtypes import precision
from phalanx.base.errors import ConfigError
from phalanx.base.sizes import size_text
from phalanx.base.text_table import table
from phalanx.config.run import Run
from phalanx.forecast.memory import OVERHEAD
from phalanx.inference.engine import EngineOptions
from phalanx.inference.memory import (
    GPU_SHARE,
    NO_DRAFTS,
    DraftRoom,
    LayerGroup,
    MemoryLimits,
    RankRoom,
    keeping,
    kept_by,
    kept_tokens,
    layer_groups,
    longest_that_fits,
    most_that,
    no_room,
    remembered,
    remembering,
    row_bytes,
    sequence_bytes,
    state_bytes,
)
from phalanx.inference.predictor import MtpSpec, check_modules, rounds
from phalanx.layout.grid import Coords
from phalanx.nn.embedding import Embedding
from phalanx.nn.module import Block
from phalanx.nn.moe import Experts
from phalanx.nn.mtp import MultiTokenPrediction
from phalanx.planning.plan import Plan

MOST = 2**16  # sequences at once that are looked for


@dataclass(frozen=True)
class RankServing:
    """One pipeline rank, at tp rank 0.

    weights      bytes of weights
    dense        bytes of those that every step reads: all but the embedding's, experts' and those of modules of
                 multi-token prediction that draft nothing
    experts      bytes of experts, of which a step reads those that its tokens choose
    groups       of layers that remember alike, with their bytes
    token_bytes  of each group, of a token in all its layers here; of ranks that share a sequence (cp), each one's part
    states       bytes of the states of one sequence, in layers that keep one
    vocabulary   tokens that it counts for penalties; 0: it draws none
    drafts       what it keeps of each sequence for drafts
    """

    weights: int
    dense: int
    experts: int
    groups: tuple[LayerGroup, ...]
    token_bytes: tuple[int, ...]
    vocabulary: int
    drafts: DraftRoom = NO_DRAFTS
    states: int = 0

    def pages(self, num_pages: Sequence[int]) -> int:
        """Bytes of so many pages of each group."""
        return sum(count * group.page_bytes for count, group in zip(num_pages, self.groups))

    def read(self, limits: MemoryLimits) -> int:
        """Bytes that a token of a sequence of the greatest length moves of it: what it reads, and states, which it
        writes too."""
        pages = sum(nbytes * limits.read(group.kept) for nbytes, group in zip(self.token_bytes, self.groups))
        return pages + 2 * self.states


@dataclass(frozen=True)
class ServingPlan:
    """A model of a layout that generates sequences of `limits.length` tokens; `dtype`: of what is remembered; `drafts`:
    of multi-token prediction."""

    plan: Plan
    limits: MemoryLimits
    dtype: torch.dtype
    ranks: tuple[RankServing, ...]
    drafts: MtpSpec | None = None

    @staticmethod
    def of(
        plan: Plan, limits: MemoryLimits, dtype: torch.dtype | None = None, drafts: MtpSpec | None = None
    ) -> ServingPlan:
        """dtype: None: that of the model. ConfigError for drafts that the model does not make in this layout."""
        if drafts is not None:
            check_modules(plan, drafts, "--speculate")
        dtype = dtype or precision(plan.run.train.precision).compute
        ranks = tuple(_rank_serving(plan, pp, limits, dtype, drafts) for pp in range(plan.grid.pp))
        return ServingPlan(plan, limits, dtype, ranks, drafts)

    @property
    def width(self) -> int:
        """Drafts of a sequence in one step."""
        return 0 if self.drafts is None else self.drafts.width(self.plan.run.model)

    def with_sequences(self, count: int) -> MemoryLimits:
        return replace(self.limits, most_sequences=count, most_tokens=max(count, self.limits.most_tokens))

    def fit(self, memory: float) -> int:
        """Sequences that fit at once, each at its full length, on devices with so many bytes."""

        def fits(count: int) -> bool:
            limits = self.with_sequences(count)
            return all(self._pages_fit(rank, memory, limits) for rank in self.ranks)

        return most_that(MOST, fits)

    def _pages_fit(self, rank: RankServing, memory: float, limits: MemoryLimits) -> bool:
        wanted = sum(limits.pages_for(group.kept) * group.page_bytes for group in rank.groups)
        return wanted <= room_on(rank, memory, limits)

    def longest(self, memory: float) -> int:
        """Tokens of the longest sequence that fits, alone; 0: none."""
        limits = self.with_sequences(1)
        return min(longest_that_fits(rank.groups, limits, room_on(rank, memory, limits)) for rank in self.ranks)

    def step_bytes(self, rank: RankServing, count: int) -> float:
        """Bytes that a rank reads in a step of one group of `count` sequences (there is one for each pipeline stage):
        weights once, and what it remembers of the group."""
        run, grid = self.plan.run, self.plan.grid
        chosen, group = 1.0, self.group(count)
        if rank.experts:
            tokens = group * max(1, grid.ep * grid.etp // (grid.tp * grid.cp))
            missed = 1 - run.model.num_experts_per_tok / run.model.routed_experts  # type: ignore[attr-defined]
            chosen = 1 - missed**tokens
        return rank.dense + chosen * rank.experts + group * rank.read(self.limits)

    def group(self, count: int) -> int:
        """Sequences in a step, of `count`: those of the fullest group."""
        return -(-count // self.plan.grid.pp)

    def tokens_per_s(self, count: int, bandwidth: float) -> float:
        """That memory allows for `count` sequences of each replica, each at its full length. Each stage of a pipeline
        computes another group; a group goes on when it has been through all of them."""
        slowest = max(self.step_bytes(rank, count) for rank in self.ranks)
        seconds = self.plan.grid.pp * slowest / bandwidth
        return count * self.plan.grid.dp / seconds


def room_on(rank: RankServing, memory: float, limits: MemoryLimits) -> int:
    """Bytes for pages on a device with so many bytes: as inference.memory.room_for_pages finds them there."""
    return int(GPU_SHARE * (memory - OVERHEAD - rank.weights)) - row_bytes(
        limits, rank.vocabulary, rank.drafts, rank.states
    )


def _rank_serving(plan: Plan, pp: int, limits: MemoryLimits, dtype: torch.dtype, drafts: MtpSpec | None) -> RankServing:
    segments = plan.blocks_of(Coords(pp=pp))
    blocks = [block for _, segment in sorted(segments.items()) for block in segment]
    compute = precision(plan.run.train.precision)
    buckets, _ = plan.buckets_of(segments)
    weights = sum(b.numel * (compute.compute if b.trained else compute.master).itemsize for b in buckets)
    depths, draws = 0 if drafts is None else drafts.depths(plan.run.model), pp == plan.grid.pp - 1
    dense, experts = read_bytes(blocks, compute.compute.itemsize)
    if drafts is not None:
        more = draft_bytes(blocks, compute.compute.itemsize, rounds(drafts.width(plan.run.model), depths))
        dense, experts = dense + more[0], experts + more[1]
    layers, kept = remembering(blocks, depths), kept_by(plan, depths)
    specs = {each: [remembered(m) for m in layers if kept_tokens(m) == each] for each in kept}
    return RankServing(
        weights,
        dense,
        experts,
        layer_groups(layers, kept, dtype, limits.own_page_size),
        tuple(-(-sum(spec.token_bytes(dtype) for spec in specs[each]) // limits.cp) for each in kept),
        plan.run.model.vocab_size if draws else 0,
        NO_DRAFTS if drafts is None else drafts.room(plan, draws),
        state_bytes(keeping(blocks), compute.compute),
    )


def draft_bytes(blocks: Sequence[Block], itemsize: int, depths: Sequence[range]) -> tuple[int, int]:
    """The same of drafts: in each round those of its depths, and the head."""
    dense = experts = 0
    for block in blocks:
        if isinstance(block, MultiTokenPrediction):
            read = [module for each in depths for module in (block.head, *(block.depths[n] for n in each))]
            found = [read_bytes([module], itemsize) for module in read]
            dense, experts = dense + sum(a for a, _ in found), experts + sum(b for _, b in found)
    return dense, experts


def read_bytes(blocks: Sequence[nn.Module], itemsize: int) -> tuple[int, int]:
    """Bytes of weights that every step reads, and of experts. Encoders and vision towers are read in the step in which
    a sequence begins, and in no other."""
    computed = [
        block
        for block in blocks
        if not isinstance(block, MultiTokenPrediction) and getattr(block, "works_on", None) is None
    ]
    modules = [m for block in computed for m in block.modules()]
    own = {
        id(p): p.numel()
        for m in modules
        if not isinstance(m, Embedding)
        for p in m._parameters.values()
        if p is not None
    }
    routed = {id(p): p.numel() for m in modules if isinstance(m, Experts) for p in m.parameters()}
    experts = sum(routed.values())
    return (sum(own.values()) - experts) * itemsize, experts * itemsize


def serving_text(serving: ServingPlan, devices: Sequence[Device]) -> str:
    """What a rank needs, and what each of these devices allows."""
    plan, length = serving.plan, serving.limits.length
    fullest = max(serving.ranks, key=lambda rank: rank.weights)
    most = max(sequence_bytes(rank.groups, serving.limits) for rank in serving.ranks)
    each = max(row_bytes(serving.with_sequences(1), rank.vocabulary, rank.drafts) for rank in serving.ranks)
    states = max(rank.states for rank in serving.ranks)
    model = plan.run.model
    pages = f"{asked_text(serving)}: {size_text(most)} of keys and values on the fullest rank"
    rows = {
        "model": f"{model.family}: {model.num_hidden_layers} layers, width {model.hidden_size:,}, vocabulary "
        f"{model.vocab_size:,}",
        "ranks": f"{plan.grid.world:,} = {plan.grid.text}",
        "precision": f"{plan.run.train.precision}, keys and values in {str(serving.dtype).removeprefix('torch.')}",
        "weights": f"{size_text(fullest.weights)} on the fullest rank",
        **({"a sequence": pages + windows_text(serving)} if most else {}),
        **({"states": f"{size_text(states)} for each sequence, however long it is"} if states else {}),
        "beside it": f"{size_text(each)} for each sequence: its last token, and counts of tokens for penalties",
    }
    if serving.drafts is not None:
        rows["drafts"] = drafts_text(serving, serving.drafts)
    said = "\n".join(f"{name:<12}{text}" for name, text in rows.items())
    made = [("device", "memory", "sequences", "one: tokens/s", "all: tokens/s")]
    for device in devices:
        count = serving.fit(device.memory)
        one, all_of_them = (
            f"{serving.tokens_per_s(n, device.bandwidth):,.0f}" if count else "-" for n in (1, max(1, count))
        )
        fits = f"{count * plan.grid.dp:,}" if count < MOST else f">= {MOST:,}"
        made.append((device.name, size_text(device.memory), fits, one, all_of_them))
    return f"{said}\n\nSequences of {length:,} tokens at once, and the rate at which memory can be read for them\n" + (
        table(made, left=(0,)) + "\n" + arithmetic(serving, devices)
    )


def drafts_text(serving: ServingPlan, drafts: MtpSpec) -> str:
    """What drafts of multi-token prediction are, and what they may bring."""
    modules, width = drafts.depths(serving.plan.run.model), serving.width
    return (
        f"{width} of a sequence in a step, by {modules} multi-token prediction module{'s' * (modules > 1)}, whose "
        f"weights and pages are counted; rates are those of no accepted draft, with all {1 + width} times as high"
    )


def asked_text(serving: ServingPlan) -> str:
    length = serving.limits.length
    encodes = any(group.kept.source for group in serving.ranks[0].groups)
    if serving.limits.source is not None:
        return f"a recording and an answer of {length:,} tokens"
    return f"a prompt and an answer of {length:,} tokens each" if encodes else f"{length:,} tokens"


def remembered_text(rank: RankServing) -> str:
    """What is remembered of a sequence, in words."""
    kinds = ["keys and values"] if rank.token_bytes else []
    return " and ".join([*kinds, *(["states"] if rank.states else [])])


def windows_text(serving: ServingPlan) -> str:
    found = [group.window for group in serving.ranks[0].groups if group.window is not None]
    return f"; layers with a window remember {', '.join(f'{w:,}' for w in found)} tokens" if found else ""


def arithmetic(serving: ServingPlan, devices: Sequence[Device]) -> str:
    """How the last device that fits got its number, in one line."""
    fits = [(device, serving.fit(device.memory)) for device in devices]
    fits = [(device, count) for device, count in fits if count]
    if not fits:
        return "None of them holds one sequence beside the weights."
    device, count = fits[-1]
    rank = max(serving.ranks, key=lambda rank: serving.step_bytes(rank, count))
    whole = serving.step_bytes(rank, count)
    group, pp, dp = serving.group(count), serving.plan.grid.pp, serving.plan.grid.dp
    remembered_bytes = group * rank.read(serving.limits)
    stages = f", in each of {pp} stages" if pp > 1 else ""
    replicas = f" x {dp} replicas" if dp > 1 else ""
    milliseconds = count / serving.tokens_per_s(count, device.bandwidth) * dp * 1e3
    return (
        f"{device.name}: a step reads {size_text(whole - remembered_bytes)} of weights and {group:,} x "
        f"{size_text(rank.read(serving.limits))} of {remembered_text(rank)} at "
        f"{device.bandwidth / 1e12:.2f} TB/s{stages}: {milliseconds:.3g} ms for {count:,} tokens{replicas}"
    )


def check_fits(serving: ServingPlan, memory: float, where: str, field: str) -> None:
    """ConfigError if not even one sequence fits in so many bytes of a device, `where`; field: what set its length."""
    if serving.fit(memory):
        return
    limits = serving.with_sequences(1)
    worst = min(serving.ranks, key=lambda rank: room_on(rank, memory, limits))
    room = f"{size_text(max(0, room_on(worst, memory, limits)))} on {where}, beside the weights"
    needs = sequence_bytes(worst.groups, limits)
    raise ConfigError([no_room(field, limits, needs, serving.longest(memory), {"room": room})])


def check_held(serving: ServingPlan, options: EngineOptions, free: int | None = None) -> None:
    """ConfigError, as an engine would find it on its ranks, if there is no room for a sequence, or for none of the
    length that is asked for. The room is `options.memory_gib`, or what weights leave of `free` bytes of a GPU; None: it
    is not known here."""
    if options.memory_gib is None:
        if free is not None and (options.length is not None or not serving.longest(free)):
            check_fits(serving, free, f"a GPU here, of which {size_text(free)} are free", "--length")
        return
    limits, whole = serving.limits, int(options.memory_gib * 2**30)
    rooms = [RankRoom.of(r.groups, limits, r.states, whole - limits.states * r.states) for r in serving.ranks]
    fullest = max(rooms, key=lambda room: sequence_bytes(room.groups, limits))
    pages, sequences = tuple(map(min, zip(*(room.pages for room in rooms)))), min(room.sequences for room in rooms)
    least = replace(fullest, pages=pages, sequences=sequences)
    least.check(limits, options.length is not None, {"--memory-gib": options.memory_gib}, "--")


def limits_of(run: Run, options: EngineOptions) -> MemoryLimits:
    """Of the engine of a run that generates. What images add to the tokens of a step is left out."""
    cp, positions = run.layout.cp, run.model.max_position_embeddings
    return MemoryLimits(
        options.sequences,
        max(options.tokens, options.sequences),
        min(options.length or positions, positions),
        options.page_size * cp,
        cp,
        max((stream.largest for stream in run.model.numbers_beside), default=None),
        options.prefix_states,
    )
