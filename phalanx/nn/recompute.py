"""Tape: which tensors of a block's forward are not stored for its backward, and how they come back; modules call
their ops through it.

A named op that is to be made again keeps its inputs alone: neither what it saves inside nor its outputs, whoever
saves those. When backward first asks for any of them the op runs again, once, on inputs that may come back the same
way. Chen et al., "Training deep nets with sublinear memory cost", 2016; Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022.

Which ops are made again is told by whoever runs the block (nn.run_block). What is saved is seen by torch.autograd's
hooks for saved tensors, so no op needs to know. Nothing here depends on random state: dropout is counter-based.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from phalanx.nn.offload import OffloadedActivations, OffloadedTensor
from phalanx.ops.dense.pieces import in_pieces
from phalanx.sequence.batch import Batch

OPS = {
    "norm": "the outputs of norms",
    "qkv": "the projections to queries, keys and values (of latent attention, down and up)",
    "rope": "norms of heads and the rotation: queries and keys as attention reads them",
    "attention": "the softmax over tokens and its output, all between the projections and the output projection",
    "up": "the MLP's first matmul (gate and up; of experts too)",
    "activation": "the MLP's activation (of experts too)",
    "dropout": "masks of dropout outside attention",
    "experts": "what experts get, compute and send back, its exchanges between ranks included",
    "mlp": "MLPs, by an eighth of their tokens at a time: of what lies between their matmuls no more is ever "
    "there (in FP8 they stay whole)",
    "layer": "whole layers but for attention between its projections: the layers' inputs and its outputs are kept",
    "block": "whole layers; their inputs alone are kept",
}
"""Names of the ops that can be made again in backward, and what of them is then not kept."""
PRESETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "pointwise": ("norm", "activation"),
    "selective": ("rope", "attention"),
    "long": ("layer", "mlp"),
    "full": ("block",),
}
"""Sets of them that have a name."""


class _Enough(Exception):
    """All that an op is to save has been made again."""


class _Recomputed:
    """An op that runs again when backward first asks for what it made. It lives as long as any node of the graph may
    ask.

    `around`: the context that it runs in, each time.
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
        ] = []  # what ops inside made that do not run again, and whether it has a gradient
        self._inputs: list[tuple[Tensor, ...]] = []  # of those, made again

    def first(self, inputs: tuple[Tensor, ...]) -> Any:
        """What the op makes the first time. In place of a tensor saved inside, its number is; an input is there
        anyway."""
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
        """make(*inputs) of an op inside that does not run again: `store` is given what it saves and makes, but for
        its inputs."""
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
        """Whether it runs again, and x is all that is still to be saved: then it is saved now."""
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
    raise RuntimeError("backward through an op that only ran to make its tensors again")


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
    """A tensor in the memory of one that is kept or made again when it is asked for."""

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
    """An output that is not stored, known by its memory while that lives."""

    storage: weakref.ref[torch.UntypedStorage]
    recomputed: _Recomputed
    number: int
    offset: int
    dtype: torch.dtype


Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class CutPoints(Protocol):
    """Something that stands between some ops of a block and what runs them (pipeline.graphs)."""

    names: Set[str]
    """Of those ops."""

    def op(self, make: Callable[..., Any], likes: Sequence[Like]) -> Callable[..., Any]:
        """What to call with inputs alone in place of make(batch, *inputs), a tensor or several, like these."""
        ...


class Recompute:
    """What the forward of the block that runs now does not store. One for all blocks of a rank; between blocks it is
    empty.

    `names` are those of the ops that ran, `reran` counts those that ran again in backward: for whoever plans. `cuts`
    is given the ops that cannot be captured, while a block is.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.reran: Counter[str] = Counter()
        self.cuts: CutPoints | None = None
        self._recomputed: Set[str] = frozenset()
        self._whole: _Recomputed | None = None  # what runs now is inside of it
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

    def op(self, name: str, make: Callable[..., Any], *inputs: Tensor) -> Any:
        """make(*inputs), a tensor or a tuple of them: neither its outputs nor what it saves are stored if `name` is
        to be made again.

        All tensors with a gradient that `make` reads must be among the inputs (weights apart). It must give the same
        bits each time.
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
        """The same of make(batch, *inputs), like `likes`, which does other things for each batch. The first of them
        alone has a gradient."""
        if self.cuts is None or name not in self.cuts.names:
            return self.op(name, partial(make, batch), *inputs)
        inside = frozenset() if name in self._recomputed else self._recomputed
        return self.op(name, self.cuts.op(partial(self._apart, make, inside), likes), *inputs)

    def cuts_at(self, name: str) -> bool:
        """Whether this op runs apart from what is captured now."""
        return self.cuts is not None and name in self.cuts.names

    def _apart(self, make: Callable[..., Any], recomputed: Set[str], *inputs: Any) -> Any:
        """make(*inputs) of an op that runs when its block does not: what is stored of it is what the block would
        store."""
        with self.block(recomputed):
            return make(*inputs)

    def output(self, name: str, made: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Where an op makes more than what is not to be stored: `made` alone is not, and make(*inputs) gives it
        again."""
        self.names.add(name)
        if name in self._recomputed:
            self._know(self._run_later(name, torch.no_grad()(make), inputs), made, inputs)

    def whole(self, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """make(*inputs) of a whole layer, whose output is the next one's input and stays."""
        self.names.add("block")
        name = next((n for n in ("block", "layer") if n in self._recomputed), None)
        if name is None:
            return make(*inputs)
        return self._run_later(name, make, inputs, partial(self._inside, self._recomputed & {"mlp"})).first(inputs)

    def keep(self, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """make(*inputs), part of attention: what does not run again of a "layer" that does. (What runs apart from a
        captured layer does.)"""
        whole = self._whole if self.cuts is None else None
        return make(*inputs) if whole is None or whole.name != "layer" else whole.keep(make, inputs, self._pack)

    def in_pieces(self, make: Callable[[Tensor], Tensor], x: Tensor, params: Iterable[Tensor]) -> Tensor:
        """make(x) of an MLP with these weights, (T, D) -> (T, D): if "mlp" is to be made again, some of the tokens
        at a time."""
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
        """Around what runs in an op that is made again itself; of what is inside only `again` is apart."""
        outer, self._recomputed, self._whole = (self._recomputed, self._whole), recomputed, whole
        try:
            yield
        finally:
            self._recomputed, self._whole = outer

    def _first(self, recomputed: _Recomputed, inputs: tuple[Tensor, ...]) -> Any:
        """Ops inside one that is made again come back with the whole."""
        with self._inside(frozenset(), None):
            return recomputed.first(inputs)

    def _run_later(self, name: str, make: Callable[..., Any], inputs: tuple[Tensor, ...], *around: Any) -> _Recomputed:
        kept, wanted = tuple(self._pack(t.detach()) for t in inputs), tuple(t.requires_grad for t in inputs)
        return _Recomputed(name, make, kept, wanted, partial(self.reran.update, (name,)), *around)

    def _know(self, recomputed: _Recomputed, made: Any, inputs: tuple[Tensor, ...]) -> None:
        """From now on `made` is not stored by who saves it. An output in the memory of an input is what the input
        is."""
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
        if (
            found is None or found.storage() is not storage or found.dtype != tensor.dtype
        ):  # memory is used anew once it is free
            return tensor if self._offloaded is None else self._offloaded.put(tensor)
        return _View(partial(found.recomputed.output, found.number), *_place(tensor, found.offset))


def _tensors(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)
