"""Selective recomputation (activation checkpointing): some ops drop their saved tensors and run again in backward.

Modules call their ops through `Recompute.op`. An op that is recomputed keeps its inputs and nothing else: neither the
tensors it saves inside nor its outputs, even if the next op saves those. When backward first needs one of them, the op
runs again, once. Its inputs may themselves be outputs of a recomputed op, which then runs again first. Chen et al.,
"Training deep nets with sublinear memory cost", 2016; Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022.

    forward      op runs ──▶ saved tensors replaced by numbers, outputs known by their storage (`_Output`)
                                            │
    backward     first saved tensor or output that is read ──▶ op runs again on its inputs ──▶ all of them are there

nn.run_block says which ops are recomputed. Torch's hooks for saved tensors see what an op saves, so no op needs to
know. Nothing depends on random state: dropout is counter-based.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from phalanx.base.dataclass import dataclass
from phalanx.nn.offload import OffloadedActivations, OffloadedTensor
from phalanx.ops.dense.pieces import in_pieces
from phalanx.sequence.batch import Batch

OPS = {
    "norm": "the outputs of norms",
    "qkv": "the projections to queries, keys and values (of latent attention, down and up), or to what a scan reads",
    "rope": "norms of heads and the rotation: queries and keys as attention reads them",
    "attention": "the softmax over tokens and its output, all between the projections and the output projection",
    "conv": "the convolution before a scan, with its activation",
    "scan": "a scan, the states before its chunks and its output",
    "delta": "a delta rule, the states before its chunks and its output",
    "up": "the MLP's first matmul (gate and up; of experts too)",
    "activation": "the MLP's activation (of experts too)",
    "dropout": "masks of dropout outside attention",
    "experts": "what experts get, compute and send back, its exchanges between ranks included",
    "mlp": "MLPs, by an eighth of their tokens at a time: of what lies between their matmuls no more is ever "
    "there (in FP8 they stay whole)",
    "layer": "whole layers but for attention between its projections: the layers' inputs and its outputs are kept",
    "block": "whole layers; their inputs alone are kept",
}
"""Ops that can be recomputed in backward -> what is then not kept."""
PRESETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "pointwise": ("norm", "activation"),
    "selective": ("rope", "attention", "conv", "scan", "delta"),
    "long": ("layer", "mlp"),
    "full": ("block",),
}
"""Values of train.recompute -> the ops they recompute."""


class _Enough(Exception):
    """Everything that the op saves has been recomputed: the rest of it need not run."""


class _Recomputed:
    """An op that runs again when backward first needs something it made. The nodes of the autograd graph that may
    need it keep it alive.

    name      of the op
    make      computes it from the inputs
    inputs    as they are kept (`Kept`); `wanted`: which of them have a gradient
    ran       called after it ran again
    around    the context that it runs in, each time
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        inputs: tuple[Any, ...],
        wanted: tuple[bool, ...],
        ran: Callable[[], None],
        around: Callable[[_Recomputed], AbstractContextManager[None]] = lambda _: nullcontext(),
    ):
        self.name, self.make, self.inputs, self.wanted, self.ran, self.around = name, make, inputs, wanted, ran, around
        self._saved = 0
        self._inside: list[Tensor] = []
        self._given: list[Tensor] = []  # the inputs, while it runs again
        self._outputs: list[Tensor] | None = None
        self._over = False
        self._kept: list[
            tuple[Kept, bool]
        ] = []  # results of ops inside that do not run again, and whether each has a gradient
        self._inputs: list[tuple[Tensor, ...]] = []  # of those ops, recomputed

    def first(self, inputs: tuple[Tensor, ...]) -> Any:
        """The result of the first run. A tensor saved inside is replaced by its number; an input is kept anyway."""
        here = list(inputs)

        def pack(tensor: Tensor) -> int | _View:
            found = _lies_in(tensor, here)
            if found is not None:
                return _View(partial(self._input, found[0]), *found[1])
            self._saved += 1
            return self._saved - 1

        with self.around(self), saved_tensors_hooks(pack, self._unpack):
            made = self.make(*inputs)
        here.clear()  # the graph keeps `pack`, and must not keep the inputs with it
        return made

    def keep(self, make: Callable[..., Tensor], inputs: tuple[Tensor, ...], store: Callable[[Tensor], Kept]) -> Tensor:
        """make(*inputs) of an op inside this one that does not run again. What it saves and its result go to `store`,
        except its inputs, which are recomputed."""
        if self._given:
            made, wanted = self._kept[len(self._inputs)]
            self._inputs.append(tuple(t.detach() for t in inputs))
            return stored(made).detach().requires_grad_(wanted)
        here, number = list(inputs), len(self._kept)

        def pack(tensor: Tensor) -> Kept:
            found = _lies_in(tensor, here)
            return store(tensor) if found is None else _View(partial(self._input_of, number, found[0]), *found[1])

        with saved_tensors_hooks(pack, stored):
            result = make(*inputs)
        here.clear()
        self._kept.append((store(result.detach()), result.requires_grad))
        return result

    def ends_with(self, x: Tensor) -> bool:
        """Whether this is the second run and `x` is the last tensor still missing. If so, `x` is saved now."""
        there = _lies_in(x, self._given) is not None
        if not self._given or len(self._inputs) < len(self._kept) or len(self._inside) + (not there) != self._saved:
            return False
        self._inside += [] if there else [x.detach()]
        return True

    def _unpack(self, kept: int | _View) -> Tensor:
        if isinstance(kept, _View):
            return kept.tensor()
        self._run()
        return self._inside[kept]

    def _input(self, number: int) -> Tensor:
        return stored(self.inputs[number])

    def _input_of(self, op: int, number: int) -> Tensor:
        self._run()
        return self._inputs[op][number]

    def output(self, number: int) -> Tensor:
        self._run()
        return self._outputs[number]  # type: ignore[index]

    def _run(self) -> None:
        if self._over:
            return
        self._given = inputs = [
            stored(t).detach().requires_grad_(wanted) for t, wanted in zip(self.inputs, self.wanted)
        ]

        def pack(tensor: Tensor) -> None:
            if _lies_in(tensor, inputs) is None:
                self._inside.append(tensor.detach())

        try:
            with torch.enable_grad(), self.around(self), saved_tensors_hooks(pack, _unreadable):
                self._outputs = [t.detach() for t in _tensors(self.make(*inputs))]
        except _Enough:
            pass
        if len(self._inside) != self._saved:
            raise RuntimeError(f"an op that ran again saved {len(self._inside)} tensors, the first time {self._saved}")
        self._given, self._over = [], True
        self._kept.clear()
        self.ran()


def _unreadable(_: Any) -> Tensor:
    raise RuntimeError("backward through an op that only ran to recompute its tensors")


Place = tuple[torch.Size, tuple[int, ...], int]
"""How a tensor lies in the memory of another: its size, its strides, and its start counted from the other's."""


def _place(tensor: Tensor, start: int) -> Place:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start


def _lies_in(tensor: Tensor, others: Sequence[Tensor]) -> tuple[int, Place] | None:
    """The number of the first of `others` in whose memory a tensor lies, and how."""
    key = tensor.untyped_storage()._cdata
    for number, other in enumerate(others):
        if other.untyped_storage()._cdata == key and other.dtype == tensor.dtype:
            return number, _place(tensor, int(other.storage_offset()))
    return None


@dataclass(frozen=True)
class _View:
    """A view of a tensor that is kept, or recomputed when it is asked for."""

    base: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        base = self.base()
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


Kept = Tensor | _View | OffloadedTensor


def stored(kept: Kept) -> Tensor:
    """The tensor, whether it was kept, is recomputed or was offloaded."""
    return kept if isinstance(kept, Tensor) else kept.tensor()


@dataclass(frozen=True)
class _Output:
    """An output that is not stored, recognized by its storage while that is alive."""

    storage: weakref.ref[torch.UntypedStorage]
    recomputed: _Recomputed
    number: int
    offset: int
    dtype: torch.dtype


Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class CutPoints(Protocol):
    """Takes over some ops of a block while the block is captured as CUDA graphs (pipeline.segments)."""

    names: Set[str]
    """Names of those ops."""

    def op(self, make: Callable[..., Any], likes: Sequence[Like]) -> Callable[..., Any]:
        """A function of the inputs to call in place of make(batch, *inputs), whose results have these shapes and
        dtypes."""
        ...


class Recompute:
    """What the forward of the current block does not store. All blocks of a rank share one; between blocks it is
    empty.

    batch    that the current block computes, for modules that are not given it and draw random numbers for its tokens;
             an op that runs again in backward finds the same
    names    of the ops that ran, for planning
    reran    how often each op ran again in backward, for planning
    cuts     while a block is captured as CUDA graphs: takes over the ops that cannot be captured
    """

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.names: set[str] = set()
        self.reran: Counter[str] = Counter()
        self.cuts: CutPoints | None = None
        self._recomputed: Set[str] = frozenset()
        self._whole: _Recomputed | None = None  # the recomputed layer that the current op is inside of
        self._offloaded: OffloadedActivations | None = None
        self._outputs: dict[int, _Output] = {}

    @contextmanager
    def block(self, recomputed: Set[str], offloaded: OffloadedActivations | None = None) -> Iterator[None]:
        """Around the forward of a block: the ops named in `recomputed` run again in its backward. What else the block
        saves goes to `offloaded`."""
        if not (recomputed or offloaded) or not torch.is_grad_enabled():
            yield
            return
        self._recomputed, self._offloaded = recomputed, offloaded
        try:
            with saved_tensors_hooks(self._pack, stored):
                yield
        finally:
            self._recomputed, self._offloaded = frozenset(), None
            self._outputs.clear()

    @contextmanager
    def of(self, batch: Batch | None) -> Iterator[None]:
        """Around the forward of a block: the batch that it computes."""
        outer, self.batch = self.batch, batch
        try:
            yield
        finally:
            self.batch = outer

    def op(self, name: str, make: Callable[..., Any], *inputs: Tensor) -> Any:
        """make(*inputs), a tensor or a tuple of tensors. If the op `name` is recomputed, neither its outputs nor what
        it saves are stored.

        All tensors with a gradient that `make` reads must be inputs, except weights. It must return the same bits
        each time.
        """
        self.names.add(name)
        if name not in self._recomputed:
            return make(*inputs)
        recomputed = self._run_later(name, make, inputs)
        made = self._first(recomputed, inputs)
        self._know(recomputed, made, inputs)
        return made

    def by_batch(
        self, name: str, make: Callable[..., Any], batch: Batch, likes: Sequence[Like], *inputs: Tensor
    ) -> Any:
        """`op` for make(batch, *inputs), whose work depends on the batch. The results have the shapes and dtypes
        `likes`, and only the first has a gradient."""
        if self.cuts is None or name not in self.cuts.names:
            return self.op(name, partial(make, batch), *inputs)
        inside = frozenset() if name in self._recomputed else self._recomputed
        return self.op(name, self.cuts.op(partial(self._between, make, inside), likes), *inputs)

    def cuts_at(self, name: str) -> bool:
        """Whether this op runs between the CUDA graphs that are captured now."""
        return self.cuts is not None and name in self.cuts.names

    def _between(self, make: Callable[..., Any], recomputed: Set[str], *inputs: Any) -> Any:
        """make(*inputs) of an op that runs between the CUDA graphs of its block, with the block's recomputation."""
        with self.block(recomputed):
            return make(*inputs)

    def _of_batch(self, batch: Batch | None, make: Callable[..., Any], *inputs: Any) -> Any:
        """make(*inputs) of an op that may run after the forward of its block."""
        with self.of(batch):
            return make(*inputs)

    def output(self, name: str, made: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> None:
        """For an op of whose results only `made` is not stored; make(*inputs) recomputes it."""
        self.names.add(name)
        if name in self._recomputed:
            self._know(self._run_later(name, torch.no_grad()(make), inputs), made, inputs)

    def whole(self, make: Callable[..., Any], *inputs: Tensor) -> Any:
        """make(*inputs) of a whole layer. Its outputs are kept: they are the next layer's inputs."""
        self.names.add("block")
        name = next((n for n in ("block", "layer") if n in self._recomputed), None)
        if name is None:
            return make(*inputs)
        return self._run_later(name, make, inputs, partial(self._inside, self._recomputed & {"mlp"})).first(inputs)

    def keep(self, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """make(*inputs) of the part of attention that does not run again when a "layer" is recomputed. (It does run
        again where it runs between CUDA graphs.)"""
        whole = self._whole if self.cuts is None else None
        return make(*inputs) if whole is None or whole.name != "layer" else whole.keep(make, inputs, self._pack)

    def in_pieces(self, make: Callable[[Tensor], Tensor], x: Tensor, params: Iterable[Tensor]) -> Tensor:
        """make(x) of an MLP with these weights, (T, D) -> (T, D). If "mlp" is recomputed, it works on some of the
        tokens at a time."""
        self.names.add("mlp")
        if "mlp" not in self._recomputed:
            return make(x)
        params = tuple(params)
        if self._whole is not None and any(t.requires_grad for t in (x, *params)) and self._whole.ends_with(x):
            self.reran["mlp"] -= 1  # the layer does without
            raise _Enough

        def alone(x: Tensor) -> Tensor:
            with self._inside(frozenset(), None):
                return make(x)

        return in_pieces(alone, x, params, partial(self.reran.update, ("mlp",)))

    def recomputes(self, name: str) -> bool:
        return name in self._recomputed

    @contextmanager
    def _inside(self, recomputed: Set[str], whole: _Recomputed | None) -> Iterator[None]:
        """Around the inside of a recomputed op: of the ops inside, only `recomputed` are recomputed separately."""
        outer, self._recomputed, self._whole = (self._recomputed, self._whole), recomputed, whole
        try:
            yield
        finally:
            self._recomputed, self._whole = outer

    def _first(self, recomputed: _Recomputed, inputs: tuple[Tensor, ...]) -> Any:
        """Run the op; ops inside it are recomputed together with it."""
        with self._inside(frozenset(), None):
            return recomputed.first(inputs)

    def _run_later(self, name: str, make: Callable[..., Any], inputs: tuple[Tensor, ...], *around: Any) -> _Recomputed:
        kept, wanted = tuple(self._pack(t.detach()) for t in inputs), tuple(t.requires_grad for t in inputs)
        make = partial(self._of_batch, self.batch, make)
        return _Recomputed(name, make, kept, wanted, partial(self.reran.update, (name,)), *around)

    def _know(self, recomputed: _Recomputed, made: Any, inputs: tuple[Tensor, ...]) -> None:
        """From now on an op that saves `made` does not store it. An output that shares its storage with an input is
        treated as the input."""
        known = {t.untyped_storage()._cdata for t in inputs}
        for number, t in enumerate(_tensors(made)):
            storage = t.untyped_storage()
            if storage._cdata not in known:
                known.add(storage._cdata)
                self._outputs[storage._cdata] = _Output(
                    weakref.ref(storage), recomputed, number, int(t.storage_offset()), t.dtype
                )

    def _pack(self, tensor: Tensor) -> Kept:
        storage = tensor.untyped_storage()
        found = self._outputs.get(storage._cdata)
        # The address of a storage may be that of an earlier one that was freed.
        if found is None or found.storage() is not storage or found.dtype != tensor.dtype:
            return tensor if self._offloaded is None else self._offloaded.put(tensor)
        return _View(partial(found.recomputed.output, found.number), *_place(tensor, found.offset))


def _tensors(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)
