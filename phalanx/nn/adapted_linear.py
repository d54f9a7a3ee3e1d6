"""Linears with adapters: the method that adds what adapters make of a linear's input to its output, and the small
linears that adapters are made of. What an adapter is, is nn/adapter.py.

Shapes: T tokens, r the rank. An adapter belongs to a global matrix, and its weights are sharded as the matrix is:

the matrix is cut by    down, (r, in)                  between them         up, (out, r)
outputs (column)        whole on each rank, on its     (T / tp, r) whole    cut by outputs; tokens are gathered
                        own tokens
nothing                 whole on each rank, on its     (T / tp, r) whole    whole on each rank, on its own tokens
                        own tokens
inputs (row)            cut by inputs; summed and      (T / tp, r) whole    whole on each rank, on its own tokens
                        scattered over tp
experts, outputs        whole on each rank of etp      (R, r) whole         cut by outputs
experts, inputs         cut by inputs                  (R, r) a part of     whole: what it adds is a part of the sum
                                                       the sum over etp     over etp too, as the base's output is

So what travels over tp is r features wide. A weight that several ranks hold whole sees other tokens, or other outputs,
on each: its gradient is the sum over them (layout.param.Replica).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.layout.box import Box, cut
from phalanx.layout.param import Init, ParamSpec, Piece, Replica
from phalanx.nn.adapted_embedding import AdaptedEmbedding
from phalanx.nn.adapted_head import AdaptedHead
from phalanx.nn.adapter import Adapter, AdapterConfig, AdapterInit, LowRankAdapter
from phalanx.nn.env import Env
from phalanx.nn.initial import ZEROS, Uniform
from phalanx.nn.linear import UnadaptedColumnLinear, UnadaptedGroupedLinear
from phalanx.nn.linear_method import (
    PLAIN,
    AnyEmbedding,
    AnyLinear,
    LinearMethod,
    LinearMethods,
    LogitsAdapter,
    RowsAdapter,
)
from phalanx.nn.module import Module, OutputRows, bias_spec, column_spec, row_spec
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.adapted_matmul import (
    LowRankProduct,
    Products,
    adapted_gather_matmul,
    adapted_matmul_scatter,
)
from phalanx.ops.dense.dropout import DROPOUT, TokenDropout, token_dropout
from phalanx.ops.dense.low_rank import Drop, add_low_rank, enter_low_rank
from phalanx.ops.dense.matmul import ALONE, gather_matmul, local_matmul, matmul_scatter
from phalanx.ops.experts.grouped import GROUPED, Later, grouped_matmul
from phalanx.ops.op import Kernels

Travel = Literal["local", "gather", "scatter", "grouped"]


@dataclass(frozen=True)
class ExpertTokens:
    """What rows (R, ...) are sorted by: `ends` (experts here,), one past each expert's last row; `source`: number of
    the micro-batch that their gradients belong to."""

    ends: Tensor
    source: int


@dataclass
class AdapterCall:
    """What local linears need to know of the call of their linear that is under way. tokens: of experts; else None."""

    tokens: ExpertTokens | None = None

    def gradient_of(self, weight: Parameter) -> Parameter:
        """The parameter with the weight's values that has the gradients of the call's micro-batch."""
        source = 0 if self.tokens is None else self.tokens.source
        return weight if source == 0 else weight.extra_grads[source - 1]

    @contextmanager
    def of(self, tokens: ExpertTokens) -> Iterator[None]:
        self.tokens = tokens
        try:
            yield
        finally:
            self.tokens = None


class AdapterLinear(Module):
    """One of an adapter's matrices, stored as `spec` says. Its weight is made when it has a name."""

    def __init__(self, env: Env, spec: ParamSpec, travel: Travel, call: AdapterCall):
        super().__init__(env)
        self.spec, self.travel, self.call = spec, travel, call
        self._weight: Parameter | None = None

    def make(self, name: str) -> None:
        """Make the weight: the pieces of `spec` are called after their base's and this name."""
        pieces = tuple(replace(p, name=f"{p.name.removesuffix('.weight')}.{name}.weight") for p in self.spec.pieces)
        self._weight = self.param(replace(self.spec, pieces=pieces))
        self._weight.add_extra_grads(self.env.ops.sources - 1 if self.travel == "grouped" else 0)

    @property
    def weight(self) -> Parameter:
        if self._weight is None:
            raise TypeError("what down or up returns must be assigned to an attribute of the adapter")
        return self.call.gradient_of(self._weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.travel == "gather":
            return gather_matmul(x, weight, self.env.tp)
        if self.travel == "scatter":
            return matmul_scatter(x, weight, self.env.tp)
        if self.travel == "local":
            return local_matmul(x, weight)
        tokens = self.call.tokens
        if tokens is None:
            raise RuntimeError("an adapter of experts was called outside its linear")
        return grouped_matmul(x, weight, tokens.ends, self.env.kernels_for(GROUPED))

    def beside(self, x: Tensor, drop: Drop | None) -> tuple[Tensor, Tensor]:
        """What the linear is to read in place of x, and what this one gives of x (or of what `drop` leaves of it),
        which x's gradient gets back in the memory of the linear's."""
        return enter_low_rank(x, self.weight, self.env.tp if self.travel == "scatter" else ALONE, drop)

    def onto(self, y: Tensor, h: Tensor, at: slice, scale: float) -> Tensor:
        """y, whose features `at` get scale times what this one gives of h, in place."""
        return add_low_rank(y, h, self.weight, at, scale, self.env.tp if self.travel == "gather" else ALONE)


class AdapterVector(Module):
    """One number for each of a matrix's outputs, stored as `spec` says. Its weight is made when it has a name."""

    def __init__(self, env: Env, spec: ParamSpec, call: AdapterCall):
        super().__init__(env)
        self.spec, self.call = spec, call
        self._weight: Parameter | None = None

    def make(self, name: str) -> None:
        """As AdapterLinear's, but the name has no `.weight` at its end."""
        pieces = tuple(replace(p, name=f"{p.name.removesuffix('.weight')}.{name}") for p in self.spec.pieces)
        self._weight = self.param(replace(self.spec, pieces=pieces))
        self._weight.add_extra_grads(self.env.ops.sources - 1 if self.spec.summed_over == "edp" else 0)

    @property
    def weight(self) -> Parameter:
        if self._weight is None:
            raise TypeError("what per_output returns must be assigned to an attribute of the adapter")
        return self.call.gradient_of(self._weight)


Made = AdapterLinear | AdapterVector


@dataclass(frozen=True, eq=False)
class ShardedPiece:
    """A phalanx.LinearPiece, and what of the matrix is here.

    linear           that has it
    by_inputs        whether its inputs are cut over ranks; else its outputs are
    rows             the runs of its outputs that are here
    columns          the run of its inputs that is here
    at               its features in what the linear gives
    experts          numbers of the experts that are here; None: it is no matrix of experts
    stack            of experts that are one tensor, which `name` is then: the module after which PEFT names the
                     tensors of its adapter, one for all experts
    made             what `down`, `up` and `per_output` have made
    """

    linear: AnyLinear
    name: str
    outputs: int
    inputs: int
    by_inputs: bool
    rows: tuple[OutputRows, ...]
    columns: tuple[int, int]
    at: slice
    experts: range | None
    call: AdapterCall
    made: list[Made] = field(default_factory=list)
    is_embedding: bool = False
    stack: str | None = None

    @property
    def env(self) -> Env:
        found: Env = self.linear.env
        return found

    @property
    def weight(self) -> Tensor:
        """(outputs here, inputs here); of experts (experts here, ...)."""
        stored: Tensor = self.linear.weight
        return stored[self.at] if self.experts is None else stored[:, self.at]

    def dropping(self, p: float) -> TokenDropout | None:
        """A matrix cut by inputs reads some features of all tokens of the micro-batch, another all features of this
        rank's."""
        if p == 0.0 or not self.linear.training:
            return None
        batch = self.env.recompute.batch
        if batch is None or self.experts is not None:
            raise RuntimeError(f"dropout of the input of {self.name}: its tokens are not known here")
        a, b = (0, batch.num_tokens) if self.by_inputs else self.env.cut(batch.num_tokens)
        rows = (batch.samples[a:b], batch.places[a:b])
        kernels = self.env.kernels_for(DROPOUT)
        return TokenDropout.of(p, self.env.seed, self.name, rows, first=self.columns[0], kernels=kernels)

    def dropout(self, x: Tensor, p: float) -> Tensor:
        how = self.dropping(p)
        return x if how is None else token_dropout(x, how)

    @torch.no_grad()
    def sum_over_inputs(self, x: Tensor) -> Tensor:
        if not self.by_inputs:
            return x
        axes = self.env.axes
        return (axes.tp if self.experts is None else axes.etp).all_reduce(x).wait()

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        """Padding rows, past the last expert's, get zeros."""
        if self.experts is None:
            return x
        tokens = self.call.tokens
        if tokens is None:
            raise RuntimeError("an adapter of experts was called outside its linear")
        rows = torch.arange(len(like), device=like.device)
        expert = torch.searchsorted(tokens.ends.to(rows.dtype), rows, right=True)
        padding = (expert == len(x)).unsqueeze(-1)
        return torch.where(padding, 0, x[expert.clamp(max=len(x) - 1)])

    def per_output(self, init: Init) -> AdapterVector:
        spec = bias_spec([*self.rows], init) if self.experts is None else self._stacked_vector(init)
        made = AdapterVector(self.env, replace(spec, exported=False), self.call)
        self.made.append(made)
        return made

    def down(self, rank: int, init: AdapterInit, trained: bool = True) -> AdapterLinear:
        """inputs -> rank."""
        spec, travel = self._down(rank, init_of(init, self.inputs))
        return self._local(replace(spec, frozen=not trained), travel)

    def up(self, rank: int, init: AdapterInit, trained: bool = True) -> AdapterLinear:
        """rank -> outputs."""
        spec, travel = self._up(rank, init_of(init, rank))
        return self._local(replace(spec, frozen=not trained), travel)

    def _down(self, rank: int, init: Init) -> tuple[ParamSpec, Travel]:
        if self.stack is not None:
            return self._stack_down(rank, init), "grouped"
        if self.experts is not None:
            box = Box((0, self.columns[0]), (rank, self.columns[1]))
            return self._stacked((rank, self.inputs), box, init, whole=not self.by_inputs), "grouped"
        if self.by_inputs:
            return row_spec(self.name, rank, self.inputs, *self.columns, init), "scatter"
        whole = OutputRows(self.name, rank, 0, rank, self.env.everyone)
        return column_spec([whole], self.inputs, init), "local"

    def _up(self, rank: int, init: Init) -> tuple[ParamSpec, Travel]:
        if self.stack is not None:
            return self._stack_up(rank, init), "grouped"
        if self.experts is not None:
            (rows,) = self.rows
            box = Box((rows.start, 0), (rows.stop, rank))
            return self._stacked((self.outputs, rank), box, init, whole=self.by_inputs), "grouped"
        return column_spec([*self.rows], rank, init), "gather" if self.linear.cut == 0 else "local"

    def _stacked(self, shape: tuple[int, int], box: Box, init: Init, whole: bool) -> ParamSpec:
        """Storage (experts here, ...) of the same box of a matrix of each; `whole`: all ranks of etp hold it."""
        experts, replicas = self.experts or range(0), self._everyone_of(whole)
        stored = (len(experts), *box.shape)
        local = Box.full(box.shape).slices()
        pieces = tuple(
            Piece(self.name.format(e), shape, box, (i, *local), init, replicas=replicas) for i, e in enumerate(experts)
        )
        return ParamSpec(stored, pieces, summed_over="edp", role="expert")

    def _stack_down(self, rank: int, init: Init) -> ParamSpec:
        """Storage (experts here, r, inputs here) of a tensor (experts r, inputs), as PEFT has it: expert after
        expert."""
        experts, (a, b), replicas = self.experts or range(0), self.columns, self._everyone_of(not self.by_inputs)
        shape, local = (self.linear.experts * rank, self.inputs), (slice(0, rank), slice(0, b - a))
        pieces = tuple(
            Piece(f"{self.stack}", shape, Box((e * rank, a), ((e + 1) * rank, b)), (i, *local), init, replicas=replicas)
            for i, e in enumerate(experts)
        )
        return ParamSpec((len(experts), rank, b - a), pieces, summed_over="edp", role="expert")

    def _stack_up(self, rank: int, init: Init) -> ParamSpec:
        """Storage (experts here, outputs here, r) of a tensor (outputs, r experts), as PEFT has it: of each of the r
        features, expert after expert."""
        (rows,), experts, count = self.rows, self.experts or range(0), self.linear.experts
        outputs, replicas = rows.stop - rows.start, self._everyone_of(self.by_inputs)
        boxes = [
            Box((rows.start, k * count + experts.start), (rows.stop, k * count + experts.stop)) for k in range(rank)
        ]
        local = (slice(0, len(experts)), slice(0, outputs))
        pieces = tuple(
            Piece(f"{self.stack}", (self.outputs, rank * count), box, (*local, k), init, True, True, replicas)
            for k, box in enumerate(boxes)
        )
        return ParamSpec((len(experts), outputs, rank), pieces, summed_over="edp", role="expert")

    def _stacked_vector(self, init: Init) -> ParamSpec:
        """Storage (experts here, outputs here)."""
        (rows,), experts = self.rows, self.experts or range(0)
        count, box = rows.stop - rows.start, Box((rows.start,), (rows.stop,))
        pieces = tuple(
            Piece(self.name.format(e), (rows.size,), box, (i, slice(0, count)), init, False, False, replicas)
            for replicas in (self._everyone_of(self.by_inputs),)
            for i, e in enumerate(experts)
        )
        return ParamSpec((len(experts), count), pieces, summed_over="edp", role="bias")

    def _everyone_of(self, whole: bool) -> tuple[Replica, ...]:
        """Replicas of what all ranks of etp hold, if they do."""
        etp = self.env.grid.etp
        return (Replica("etp", tuple(range(etp))),) if whole and etp > 1 else ()

    def _local(self, spec: ParamSpec, travel: Travel) -> AdapterLinear:
        """Hugging Face folders of the model do not have it."""
        made = AdapterLinear(self.env, replace(spec, exported=False), travel, self.call)
        self.made.append(made)
        return made


def init_of(init: AdapterInit, inputs: int) -> Init:
    if isinstance(init, Init):
        return init
    return ZEROS if init == "zeros" else Uniform(1 / math.sqrt(inputs))


def pieces_of(linear: AnyLinear, call: AdapterCall | None = None) -> list[ShardedPiece]:
    """The global matrices of a linear, in the order of its outputs; the one tensor of experts that are one
    (StackedNames)."""
    call, names = call or AdapterCall(), list(dict.fromkeys(linear.names))
    if isinstance(linear, UnadaptedColumnLinear | UnadaptedGroupedLinear):
        return []
    if not linear.experts:
        return [_dense(linear, name, call) for name in names]
    if "{}" not in names[0]:
        return [_of_stack(linear, call)]
    return [_of_experts(linear, n, call) for n in range(len(names))]


def _dense(linear: AnyLinear, name: str, call: AdapterCall) -> ShardedPiece:
    env: Env = linear.env
    found = [p for p in linear.weight.spec.pieces if p.name == name]
    first = found[0]
    out, inner = (1, 0) if first.transposed else (0, 1)
    outputs, by_inputs = first.shape[out], linear.cut == 1
    at = [p.slices[0] for p in found]
    if any(a.stop != b.start for a, b in zip(at, at[1:])):
        raise ValueError(f"{name} does not lie in one run of the outputs of its linear")
    if by_inputs:
        rows = [OutputRows(name, outputs, 0, outputs, env.everyone)]
    else:
        rows = [OutputRows(name, outputs, p.box.start[out], p.box.stop[out], p.replicas) for p in found]
    columns = first.box.start[inner], first.box.stop[inner]
    place = slice(at[0].start, at[-1].stop)
    return ShardedPiece(linear, name, outputs, first.shape[inner], by_inputs, tuple(rows), columns, place, None, call)


def _of_experts(linear: AnyLinear, number: int, call: AdapterCall) -> ShardedPiece:
    env: Env = linear.env
    names = list(dict.fromkeys(linear.names))
    first = linear.weight.spec.pieces[number]
    (outputs, inputs), box = first.shape, first.box
    experts = range(*cut(linear.experts, env.grid.ep)[env.grid.expert_coords(env.at).ep])
    rows = (OutputRows(names[number], outputs, box.start[0], box.stop[0]),)
    columns = box.start[1], box.stop[1]
    at = first.slices[1]
    by_inputs = linear.cut == 1
    return ShardedPiece(linear, names[number], outputs, inputs, by_inputs, rows, columns, at, experts, call)


def _of_stack(linear: AnyLinear, call: AdapterCall) -> ShardedPiece:
    """PEFT wraps the module that has the tensors once for each, in their order: the one of outputs is the inner."""
    (name,), (first,) = linear.names, linear.weight.spec.pieces
    (_, inputs, outputs), box, module = first.shape, first.box, name.rpartition(".")[0]
    by_inputs = linear.cut == 1
    rows = (OutputRows(name, outputs, box.start[2], box.stop[2]),)
    at = slice(0, box.stop[2] - box.start[2])
    columns, experts = (box.start[1], box.stop[1]), range(box.start[0], box.stop[0])
    stack = module if by_inputs else f"{module}.base_layer"
    return ShardedPiece(linear, name, outputs, inputs, by_inputs, rows, columns, at, experts, call, stack=stack)


class AdaptedMethod(Module, LinearMethod):
    """What another method makes of the frozen weight, and beside it what adapters make of the input, unless they are
    not `on`."""

    def __init__(
        self, linear: AnyLinear, base: LinearMethod, adapters: list[tuple[ShardedPiece, Adapter]], call: AdapterCall
    ):
        super().__init__(linear.env)
        self.base, self.adapters, self.call = base, adapters, call
        self.on = True
        self.combines = any(adapter.combines() for _, adapter in adapters)
        self.adds_terms = all(
            isinstance(adapter, LowRankAdapter) and adapter.adds_terms() and piece.experts is None
            for piece, adapter in adapters
        )
        self.linears = nn.ModuleList()
        for piece, adapter in adapters:
            self.linears.extend(make(piece, adapter))

    def gather_matmul(self, x: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        first, last = self._biases(bias)
        if products := self._in_one_pass(weight):
            return adapted_gather_matmul(x, weight, tp, first, products)
        if self.on and self.adds_terms:
            return self._with_terms(x, lambda x: self.base.gather_matmul(x, weight, tp, first))
        return self._joined(self.base.gather_matmul(x, weight, tp, first), x, last)

    def matmul_scatter(self, h: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        first, last = self._biases(bias)
        if products := self._in_one_pass(weight):
            return adapted_matmul_scatter(h, weight, tp, first, products)
        if self.on and self.adds_terms:
            return self._with_terms(h, lambda h: self.base.matmul_scatter(h, weight, tp, first))
        return self._joined(self.base.matmul_scatter(h, weight, tp, first), h, last)

    def grouped_matmul(
        self,
        x: Tensor,
        weight: Parameter,
        ends: Tensor,
        kernels: Kernels,
        bias: Tensor | None = None,
        later: Later | None = None,
    ) -> Tensor:
        y = self.base.grouped_matmul(x, weight, ends, kernels, bias, later)
        with self.call.of(ExpertTokens(ends, weight.source)):
            return self._joined(y, x)

    def _in_one_pass(self, weight: Parameter) -> Products | None:
        """The terms, where one op multiplies with the frozen weight and with theirs: all of them see the input whole,
        and the weight is multiplied with as it is stored."""
        if not (self.on and self.adds_terms and self.base is PLAIN) or weight.requires_grad:
            return None
        terms = [(piece, term) for piece, adapter in self.adapters for term in adapter.terms()]  # type: ignore[attr-defined]
        if any(piece.dropping(term.dropout) for piece, term in terms):
            return None
        return Products([LowRankProduct(t.down.weight, t.up.weight, piece.at, t.scale) for piece, t in terms])

    def _with_terms(self, x: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """What the base gives of x, with all terms added in its memory."""
        entered = list[Tensor]()
        terms = [(piece, term) for piece, adapter in self.adapters for term in adapter.terms()]  # type: ignore[attr-defined]
        for piece, term in terms:
            x, h = term.down.beside(x, piece.dropping(term.dropout))
            entered.append(h)
        y = base(x)
        for (piece, term), h in zip(terms, entered):
            y = term.up.onto(y, h, piece.at, term.scale)
        return y

    def is_plain(self, weight: Parameter) -> bool:
        return False

    @torch.no_grad()
    def settle(self) -> None:
        """Before the first use of weights that have changed."""
        for _, adapter in self.adapters:
            adapter.settle()

    def _biases(self, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The bias that the base adds, and the one that is added at the end: what `combine` overrides gets is without
        it."""
        return (None, bias) if self.combines and self.on else (bias, None)

    def _joined(self, y: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """y with each adapter's delta of x combined with its features, and the bias."""
        if not self.on:
            return y
        parts, at = list[Tensor](), 0
        for piece, adapter in self.adapters:
            own = piece.at
            if at < own.start:
                parts.append(y[:, at : own.start])
            parts.append(adapter.combine(y[:, own], adapter.delta(x)))
            at = own.stop
        if at < y.shape[1]:
            parts.append(y[:, at:])
        made = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return made if bias is None else made + bias


@dataclass(frozen=True)
class AdaptedLinears:
    """Which linears have adapters: those with a matrix whose name fits one of `targets`. base: chooses the method of
    the frozen weights; None: all are plain."""

    method: type[Adapter]
    config: AdapterConfig
    base: LinearMethods | None = None

    def takes(self, piece: ShardedPiece) -> bool:
        if piece.stack is not None:
            return fits_outside(piece.name, self.config.targets)
        return all(fits(name, self.config.targets) for name in names_of(piece))

    def method_of(self, linear: AnyLinear) -> LinearMethod:
        base, call = PLAIN if self.base is None else self.base.method_of(linear), AdapterCall()
        taken = [piece for piece in pieces_of(linear, call) if self.takes(piece)]
        adapters = [(piece, self.method(piece, self.config)) for piece in taken]
        return AdaptedMethod(linear, base, adapters, call) if adapters else base

    def rows_of(self, embedding: AnyEmbedding) -> RowsAdapter | None:
        if not fits_outside(embedding.weight.spec.name, self.config.targets):
            return None
        return AdaptedEmbedding(embedding, self.method, self.config)

    def logits_of(self, head: AnyLinear) -> LogitsAdapter | None:
        (name,) = head.names
        if not fits_outside(name, self.config.targets):
            return None
        (piece,) = pieces_of(head)
        adapter = self.method(piece, self.config)
        if not isinstance(adapter, LowRankAdapter):
            raise TypeError(f"{self.config.method} has no form for a head, which takes a LowRankAdapter")
        make(piece, adapter)
        return AdaptedHead(head.env, piece, adapter)


def make(piece: ShardedPiece, adapter: Adapter) -> list[Made]:
    """Make the weights of an adapter of this matrix, named by its attributes."""
    for name, value in vars(adapter).items():
        if isinstance(value, Made):
            value.make(name)
    return piece.made


def fits_outside(name: str, globs: list[str]) -> bool:
    """Whether a glob names an embedding, a head, or experts that are one tensor: "*" means the linears of layers."""
    return fits(name, [glob for glob in globs if glob.strip("*.") not in ("", "weight")])


def names_of(piece: ShardedPiece) -> list[str]:
    """Global names of the matrices that one adapter is for: one, or that of each expert here."""
    return (
        [piece.name]
        if piece.experts is None or piece.stack is not None
        else [piece.name.format(e) for e in piece.experts]
    )


def fits(name: str, globs: list[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
