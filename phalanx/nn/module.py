"""Module: a torch module whose parameters carry their ParamSpec. Block: the unit of pipelines, buckets and
recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.base.dataclass import dataclass
from phalanx.layout.box import Box
from phalanx.layout.param import Init, MatrixOutputs, ParamSpec, Piece, Replica, Role
from phalanx.nn.env import Env
from phalanx.nn.initial import ZEROS
from phalanx.nn.memory import LayerMemory, LayerStates, PageSpec, StateSpec
from phalanx.nn.parameter import Parameter
from phalanx.nn.state_watch import StateWatch
from phalanx.sequence.batch import TEXT, Batch
from phalanx.sequence.streams import Border, Streams


class Module(nn.Module):
    """A torch module whose parameters know how they are sharded; `self.param(...)` creates one on the meta device.

    first_in_memory   names of parameters, below this module, that are stored before its others, in this order; the
                      others follow in the order of the modules
    """

    first_in_memory: tuple[str, ...] = ()
    remembers: PageSpec | None = None
    """What it remembers of each token of a sequence that goes on (generation)."""
    keeps: StateSpec | None = None
    """What it remembers of a whole sequence that goes on, however long."""
    whole_only: str | None = None
    """Why it takes whole sequences alone; None: they may go on."""

    def __init__(self, env: Env):
        super().__init__()
        self.env = env
        self.memory: LayerMemory | None = None
        self.states: LayerStates | None = None
        self.watch: StateWatch | None = None  # of a layer that keeps states, while one that overflows is looked for

    def param(self, spec: ParamSpec) -> Parameter:
        spec = replace(spec, frozen=spec.frozen or self.env.freezes(spec))
        if copies := self.env.weights.copies:
            spec = replace(spec, pieces=tuple(replace(p, replicas=(*p.replicas, *copies)) for p in spec.pieces))
        empty = torch.empty(spec.shape, dtype=self.env.weights.dtype, device="meta")
        return Parameter(empty, spec, spec.learns, self.env.weights.gradients)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        for _, each in self.named_parameters(recurse=recurse):
            if not isinstance(each, Parameter):
                raise TypeError(f"{type(self).__name__} has a parameter without a spec: make it with self.param(...)")
            yield each

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch's, in the order in which the parameters are stored."""
        found = dict(super().named_parameters(prefix, recurse, remove_duplicate))
        for path, module in self.named_modules(prefix=prefix):
            if isinstance(module, Module) and module.first_in_memory:
                found = _reordered(found, path, module.first_in_memory)
        yield from found.items()

    def replicated(self, name: str, size: int, init: Init, role: Role = "bias") -> Parameter:
        """A vector that each tp rank holds whole (norm weights, biases added to scattered tokens), without weight
        decay."""
        whole = Piece(
            name, (size,), Box.full((size,)), (slice(0, size),), init, decay=False, replicas=self.env.everyone
        )
        return self.param(ParamSpec((size,), (whole,), role=role))

    def takes_lazy(self, x: Tensor) -> bool:
        """Whether a lazy tensor (ops.lazy_tensor) may be the input in place of one like x: a single linear reads it and
        casts it to FP8."""
        return False

    def flops(self, seq_length: int) -> float:
        """Forward FLOPs per token of the whole (unsharded) module: 2 for each weight of a matmul; causal attention
        counts half."""
        return sum(m.flops(seq_length) for m in self.children() if isinstance(m, Module))

    def loss_flops(self, seq_length: int) -> float:
        """The FLOPs of heads among these. In training, heads compute the gradients of their matmuls in forward."""
        return sum(m.loss_flops(seq_length) for m in self.children() if isinstance(m, Module))


def own_memory(module: Module) -> LayerMemory:
    """Where it remembers sequences that go on."""
    if module.memory is None:
        raise RuntimeError(f"{type(module).__name__} is given sequences that go on, and has no memory of them")
    return module.memory


def own_states(module: Module) -> LayerStates:
    """The states of sequences that go on."""
    if module.states is None:
        raise RuntimeError(f"{type(module).__name__} is given sequences that go on, and has no states of them")
    return module.states


def _reordered(found: dict[str, nn.Parameter], path: str, first: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """The same, with the parameters of the module at `path` that are named `first` before its others."""
    at = f"{path}." if path else ""
    mine = [name for name in found if name.startswith(at)]
    front = [at + name for name in first if at + name in found]
    order = iter([*front, *(name for name in mine if name not in front)])
    return {(n := next(order) if name.startswith(at) else name): found[n] for name in found}


class Block(Module):
    """A step of the model: x of this rank's tokens -> x. The first block ignores x, the last returns the summed loss.

    takes_streams   it takes all streams (sequence.streams) by name and returns those that go on; other blocks take
                    "hidden", and any further streams pass them by
    works_on        the stream beside the text (Batch.beside) that is all it works on: an encoder's text, images. It
                    remembers nothing, and where a step of generation has none of them, it has nothing to do
    """

    takes_streams = False
    works_on: str | None = None

    recomputable = True  # False for a block that computes gradients in forward: run again, it would add them twice

    # names of nn.recompute.OPS that are recomputed in backward; set by the plan
    recomputed: frozenset[str] = frozenset()
    offloaded = False  # whether its saved activations are offloaded to the host; set by the plan

    @property
    def reads_labelled(self) -> bool:
        """Whether it reads the tokens with a label alone, where they are few (Batch.label_rows)."""
        return False

    def forward(self, x: Any, batch: Batch) -> Tensor | Streams:
        raise TypeError(f"{type(self).__name__} has no forward")

    def remembering(self) -> list[Module]:
        """The modules in it that remember something while sequences go on, in the order of the model."""
        if self.works_on is not None:
            return []
        return [m for m in self.modules() if isinstance(m, Module) and m.remembers is not None]

    def is_idle(self, batch: Batch) -> bool:
        """Whether the batch has nothing of what it works on."""
        return self.works_on is not None and batch.beside[self.works_on].idle

    def keeping(self) -> list[Module]:
        """The modules in it that keep a state of each sequence that goes on."""
        return [m for m in self.modules() if isinstance(m, Module) and m.keeps is not None]

    def drafting(self, depths: int) -> list[Module]:
        """The same of modules that only draft tokens: of the first so many depths of multi-token prediction."""
        return []

    def flops_per_token(self, lengths: Mapping[str, int], mixing: bool = True) -> float:
        """Forward FLOPs for each token of the text, where the sequences of each stream of tokens (sequence.batch: TEXT,
        and those beside it) have these lengths; not `mixing`: without attention to other tokens."""
        return self.flops(lengths[TEXT] if mixing else 0)

    def streams(self, given: Border) -> Border:
        """The streams that leave this block if it takes these. The first block takes "hidden"."""
        return given


@dataclass(frozen=True)
class OutputRows:
    """A slice of output features of one global matrix: `start..stop` of `size`, also held by `replicas`. `init`: its
    initial values, if they differ from those of the other matrices. `outputs`: as in Piece."""

    name: str
    size: int
    start: int
    stop: int
    replicas: tuple[Replica, ...] = ()
    init: Init | None = None
    outputs: tuple[MatrixOutputs, ...] = ()


def column_spec(rows: list[OutputRows], inputs: int, init: Init, transposed: bool = False) -> ParamSpec:
    """Storage (sum of rows, inputs) that stacks slices of output features. `transposed`: the global matrices are
    (inputs, outputs)."""
    pieces, at = [], 0
    for r in rows:
        n = r.stop - r.start
        shape, box = (r.size, inputs), Box((r.start, 0), (r.stop, inputs))
        if transposed:
            shape, box = (inputs, r.size), Box((0, r.start), (inputs, r.stop))
        local = (slice(at, at + n), slice(0, inputs))
        pieces.append(Piece(r.name, shape, box, local, r.init or init, True, transposed, r.replicas, r.outputs))
        at += n
    return ParamSpec((at, inputs), tuple(pieces))


def bias_spec(rows: list[OutputRows], init: Init = ZEROS) -> ParamSpec:
    """Storage with one number for each output feature, such as the biases that belong to `column_spec(rows)`; no weight
    decay."""
    pieces, at = [], 0
    for r in rows:
        n = r.stop - r.start
        pieces.append(
            Piece(r.name, (r.size,), Box((r.start,), (r.stop,)), (slice(at, at + n),), init, False, False, r.replicas)
        )
        at += n
    return ParamSpec((at,), tuple(pieces), role="bias")


def row_spec(
    name: str, outputs: int, inputs: int, start: int, stop: int, init: Init, transposed: bool = False
) -> ParamSpec:
    """Storage (outputs, stop - start) of a matrix whose inputs are sharded over tp."""
    shape, box = (outputs, inputs), Box((0, start), (outputs, stop))
    if transposed:
        shape, box = (inputs, outputs), Box((start, 0), (stop, outputs))
    whole = (slice(0, outputs), slice(0, stop - start))
    return ParamSpec((outputs, stop - start), (Piece(name, shape, box, whole, init, True, transposed),))
