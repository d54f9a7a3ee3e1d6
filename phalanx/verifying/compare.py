"""verify: does a layout compute what one process computes? Uses small copies of the user's own run, in float64, on CPU
ranks.

`verify` makes the copies (verifying/shrink.py) and has the caller start their ranks; `verify_rank` is what each rank
runs; `compare` is the comparison.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError
from phalanx.base.placement import Placement
from phalanx.base.rng import fill_normal_
from phalanx.comm.axis import Axis
from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh, init_world, leave_world
from phalanx.config.run import Run
from phalanx.data.loader import Loader, train_loader
from phalanx.engine.build import State, build, draw_weights
from phalanx.engine.model import Model
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.box import Box
from phalanx.layout.grid import Coords
from phalanx.layout.param import Piece
from phalanx.nn.initial import ONES
from phalanx.ops.optimizer.shard import widened
from phalanx.planning.order import global_batch_at, step_samples
from phalanx.planning.plan import storing_all, without_layout
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.verifying.shrink import small_copies


class VerifyFailed(PhalanxError):
    """The layout computes something different from one process."""

    exit_code = 1


def verify(
    run: Run, world: int, start: Callable[[Run, int, int], None], steps: int = 2, say: Callable[[str], None] = print
) -> None:
    """Compare the layout of `run` on `world` ranks with one process. `start(run, world, steps)` must call `verify_rank`
    on each rank.

    At the end it reports the structures of the run that were kept and those that were given up, even if a copy differs.
    """
    found = small_copies(run, world)
    try:
        for number, copy in enumerate(found.copies):
            say(copy.text if number == 0 else copy.text.splitlines()[-1])
            start(copy.run, copy.world, steps)
    finally:
        say(found.report)


def verify_rank(run: Run, placement: Placement, steps: int = 2) -> None:
    """One rank's part. Rank 0 reports success, or raises VerifyFailed with the first difference."""
    init_world(
        placement.rank,
        placement.world_size,
        placement.init_method,
        torch.device("cpu"),
        run.train.timeout_s,
        placement.secret,
    )
    try:
        verdict = compare(run, placement.rank, placement.world_size, steps)
    finally:
        leave_world()
    if placement.rank == 0:
        if not verdict.ok:
            raise VerifyFailed(verdict.text)
        print(verdict.text, flush=True)


# ---- what is compared ----------------------------------------------------------------------------

Boxes = dict[str, list[tuple[Box, Tensor]]]
"""Global tensor -> this rank's boxes of it, float64; elements that belong to other ranks are NaN."""


@dataclass
class Followed:
    """What some steps computed: () losses (and those of multi-token prediction) and norms, and this rank's boxes of
    each step's gradients and of the final weights."""

    losses: list[Tensor] = field(default_factory=list)
    mtp_losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    tensors: list[tuple[str, Boxes]] = field(default_factory=list)


def follow(run: Run, mesh: Mesh, steps: int, drop: Site | None = None) -> Followed:
    """Train `steps` steps from weights that are random everywhere. `drop`: replace this collective by nothing (for
    tests)."""
    state = build(make_plan(run, mesh.grid.world), mesh)
    random_weights(state.model)
    mesh.watch.on, mesh.watch.drop = drop is not None, drop
    state.model.train()
    loader = train_loader(
        run.data,
        seq_length=run.train.seq_length,
        seed=run.train.seed,
        vocab_size=run.model.vocab_size,
        samples=steps * run.train.global_batch,
        reading=reading_of(run),
    )
    record, consumed = Followed(), 0
    for step in range(steps):
        tokens = accumulate(state, step_batches(run, loader, mesh, consumed))
        consumed += global_batch_at(run, consumed)
        record.tensors.append((f"step {step + 1}, gradient of", boxes_of(state, "grad")))
        result = update(state, tokens, lr=1e-2)
        record.losses.append(result.loss)
        record.norms.append(result.grad_norm)
        if result.mtp_loss is not None:
            record.mtp_losses.append(result.mtp_loss)
    state.buffers.ready()
    record.tensors.append((f"after step {steps}, weights of", boxes_of(state, "master")))
    mesh.watch.on, mesh.watch.drop = False, None
    return record


def step_batches(run: Run, loader: Loader, mesh: Mesh, consumed: int) -> list[Batch]:
    """This rank's micro-batches of the step that starts after `consumed` samples."""
    count = global_batch_at(run, consumed)
    size, part, found = run.train.micro_batch, mesh.part, list[Batch]()
    for samples in step_samples(run, loader, consumed, mesh.dp.size, mesh.dp.index):
        own = samples[part.replica * size : (part.replica + 1) * size]
        batch = with_fewer_labels(loader.batch(samples, part), [(sample - consumed) / count for sample in own])
        found.append(batch.cut(part))
    return found


def with_fewer_labels(batch: Batch, parts: list[float]) -> Batch:
    """The batch without the loss of the first tokens of each sequence, up to half of them: the later in its step the
    sequence is (`parts`, from 0 to 1), the more. So ranks and micro-batches differ in how many tokens have a loss, and
    wrong weights between them become visible."""
    labels = batch.labels.view(len(parts), -1).clone()
    for row, part in enumerate(parts):
        labels[row, : round(part * batch.seq_length / 2)] = IGNORE
    return replace(batch, labels=labels.view(-1))


def random_weights(model: Model) -> None:
    """Random values for every tensor, norms and biases too: ones and zeros would hide errors."""

    def draw(out: Tensor, piece: Piece) -> None:
        fill_normal_(out, 0.3, piece.shape, piece.box.start, 7, piece.name)
        out.add_(1.0 if piece.init == ONES else 0.0)

    draw_weights(model.buffers, draw)


def boxes_of(state: State, what: Literal["grad", "master"]) -> Boxes:
    """This rank's boxes of every global tensor in its shards."""
    found: Boxes = {}
    for flat in (f for f in state.buffers.flat if f.bucket.learns or what == "master"):
        whole = torch.full((flat.bucket.numel,), torch.nan, dtype=torch.float64)
        first, values = (flat.lo, flat.own_grad) if what == "grad" else flat.storage.values()
        whole[first : first + len(values)] = widened(values, torch.float64)
        for slot in flat.bucket.slots:
            storage = whole[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            for piece in slot.spec.pieces:
                found.setdefault(piece.name, []).append((piece.box, piece.of(storage).clone()))
    return found


# ---- the comparison ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A tensor of `what` that is off by `off` where `bound` is allowed; ranks: those with the deviation. missing:
    elements that no rank holds."""

    what: str
    name: str
    off: float
    bound: float
    ranks: tuple[int, ...]
    missing: int = 0

    @property
    def wrong(self) -> bool:
        return self.missing > 0 or not self.off <= self.bound

    def __str__(self) -> str:
        if self.missing:
            return f"{self.what} {self.name}: {self.missing} elements are NaN or on no rank"
        where = f" on ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.what} {self.name} is off by {self.off:.3g} (allowed {self.bound:.3g}){where}"


@dataclass(frozen=True)
class Verdict:
    """`text` is for people; `differences` are in the order of steps and of the model."""

    text: str
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences


def compare(run: Run, rank: int, world: int, steps: int = 2, drop: Site | None = None) -> Verdict:
    """Train on this layout, and alone on rank 0; every rank compares its own boxes with rank 0's tensors. The result is
    the same on all ranks."""
    alone = without_layout(replace(storing_all(run), layout=replace(run.layout, sharding=0)))
    truth = follow(alone, Mesh(make_plan(alone, 1).grid), steps) if rank == 0 else Followed()
    mesh = Mesh(make_plan(run, world).grid, rank)
    mine = follow(run, mesh, steps, drop)
    shapes, kept = global_shapes(alone), global_shapes(alone, untrained=True)
    last = len(mine.tensors) - 1  # the weights
    found = [
        d
        for number in range(last + 1)
        for d in compare_tensors(mine, truth, number, kept if number == last else shapes, mesh.world)
    ]
    found += compare_scalars("loss", mine.losses, truth.losses, mesh.world)
    found += compare_scalars("loss of multi-token prediction", mine.mtp_losses, truth.mtp_losses, mesh.world)
    found += compare_scalars("gradient norm", mine.norms, truth.norms, mesh.world)
    wrong = tuple(d for d in found if d.wrong)
    text = failure_text(wrong, len(found), mine, mesh) if wrong else success_text(found, steps, len(shapes))
    mesh.close()
    return Verdict(text, wrong)


def global_shapes(alone: Run, untrained: bool = False) -> dict[str, tuple[int, ...]]:
    """Every global tensor in model order, adapters included; those without a gradient only if `untrained`."""
    segments = make_plan(alone, 1).blocks_of(Coords()).values()
    once = {id(p): p.spec for segment in segments for block in segment for p in block.parameters()}
    return {piece.name: piece.shape for spec in once.values() if spec.learns or untrained for piece in spec.pieces}


def compare_tensors(
    mine: Followed, truth: Followed, number: int, shapes: dict[str, tuple[int, ...]], world: Axis
) -> Iterator[Difference]:
    """The difference of every tensor, in model order, with its tolerance."""
    what, boxes = mine.tensors[number]
    expected, covered = packed(shapes), packed(shapes)
    if world.index == 0:
        for name, whole in expected.views.items():
            for box, values in truth.tensors[number][1][name]:
                whole[box.slices()] = values
    world.broadcast(expected.flat, 0)
    offs = torch.zeros(len(shapes), dtype=torch.float64)
    for i, (name, right) in enumerate(expected.views.items()):
        for box, values in boxes.get(name, ()):
            here = ~values.isnan()
            covered.views[name][box.slices()] += here
            if here.any():
                offs[i] = torch.maximum(offs[i], (values - right[box.slices()])[here].abs().max())
    world.all_reduce(covered.flat).wait()
    per_rank = world.all_gather(offs).wait().view(world.size, -1).t().tolist()
    largest = expected.flat.abs().max().item()
    for (name, right), off in zip(expected.views.items(), per_rank):
        bound = allowed(right.abs().max().item(), largest)
        wrong = tuple(rank for rank, o in enumerate(off) if not o <= bound)
        yield Difference(what, name, max(off), bound, wrong, int((covered.views[name] == 0).sum()))


def allowed(scale: float, largest: float) -> float:
    """How far a tensor may be off: 1e-9 x max(its own scale, 1e-6 x the largest of all), because some true gradients
    are zero (key biases)."""
    return 1e-9 * max(scale, 1e-6 * largest)


@dataclass(frozen=True)
class Packed:
    """Tensors by name in one flat tensor, so that one collective serves them all."""

    flat: Tensor
    views: dict[str, Tensor]


def packed(shapes: dict[str, tuple[int, ...]]) -> Packed:
    sizes = [prod(shape) for shape in shapes.values()]
    flat = torch.zeros(sum(sizes), dtype=torch.float64)
    return Packed(flat, {name: part.view(shape) for (name, shape), part in zip(shapes.items(), flat.split(sizes))})


def compare_scalars(what: str, mine: list[Tensor], truth: list[Tensor], world: Axis) -> Iterator[Difference]:
    """One value per step, on every rank."""
    for step, value in enumerate(mine):
        right = world.broadcast((truth[step] if world.index == 0 else torch.zeros_like(value)).clone(), 0)
        offs = world.all_gather((value - right).abs().view(1)).wait().tolist()
        bound = 1e-9 * right.abs().item()
        yield Difference(
            f"step {step + 1},", what, max(offs), bound, tuple(r for r, o in enumerate(offs) if not o <= bound)
        )


def success_text(found: list[Difference], steps: int, tensors: int) -> str:
    worst = max(found, key=lambda d: d.off / d.bound if d.bound else 0.0)
    return (
        f"OK: losses, norms, gradients of {tensors} tensors over {steps} steps and the weights after them "
        "are those of one process.\n"
        f"Largest deviation: {worst.what} {worst.name}, {worst.off:.2g} (allowed {worst.bound:.2g})"
    )


def failure_text(wrong: tuple[Difference, ...], compared: int, mine: Followed, mesh: Mesh) -> str:
    """The first difference with the boxes of its tensor, and the last of the same step (a wrong backward spreads
    towards the input)."""
    first = wrong[0]
    same = [d for d in wrong if d.what == first.what]
    boxes = next((b.get(first.name, []) for what, b in mine.tensors if what == first.what), [])
    reported = json.dumps(
        [",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop)) for box, values in boxes if not values.isnan().all()]
    )
    lines = [f"DIFFERS from one process: {first}", *_box_lines(mesh.world.all_gather_text(reported), mesh)]
    if len(same) > 1:
        lines.append(f"The last in model order: {same[-1]}")
    lines.append(f"{len(wrong)} of {compared} compared values differ, {len(same)} of them at this point.")
    return "\n".join(lines)


def _box_lines(reported: list[str], mesh: Mesh) -> list[str]:
    lines = []
    for rank, text in enumerate(reported):
        at = mesh.grid.coords(rank)
        if json.loads(text):
            lines.append(
                f"  rank {rank} (pp {at.pp}, dp {at.dp}, cp {at.cp}, tp {at.tp}) holds [{'] ['.join(json.loads(text))}]"
            )
    return lines
