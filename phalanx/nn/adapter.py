"""The Adapter protocol: what a file must say to add a method of fine-tuning by small trained weights beside frozen
ones, such as LoRA.

How the weights are sharded, what travels between ranks and where they are saved is no concern of it
(nn/adapted_linear.py). Torch is not imported here: a config that names a method is read without it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.own_fields import section_of
from phalanx.base.registry import completed, find, registers
from phalanx.layout.param import Init

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

SEAM = "adapter"
AdapterInit = Literal["kaiming", "zeros"] | Init
"""Initial weights of a local linear: kaiming (uniform within 1 / sqrt(inputs), as PEFT's lora_A and torch's Linear),
zeros, or an Init."""


class LocalLinear(Protocol):
    """What `down` and `up` make. weight: what is here of its matrix."""

    @property
    def weight(self) -> Tensor: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


class LocalVector(Protocol):
    """What `per_output` makes. weight: its numbers that are here."""

    @property
    def weight(self) -> Tensor: ...


class LinearPiece(Protocol):
    """A global matrix that an adapter belongs to.

    name             its global name; of experts `{}` stands for the number
    outputs, inputs  its whole size; of an embedding, width and vocabulary
    is_embedding     whether its inputs are ids: `delta` gets these, and `down` looks them up
    """

    @property
    def name(self) -> str: ...

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    @property
    def is_embedding(self) -> bool: ...

    def down(self, rank: int, init: AdapterInit, trained: bool = True) -> LocalLinear:
        """As Adapter.down."""
        ...

    def up(self, rank: int, init: AdapterInit, trained: bool = True) -> LocalLinear:
        """As Adapter.up."""
        ...

    def per_output(self, init: Init) -> LocalVector:
        """As Adapter.per_output."""
        ...

    @property
    def weight(self) -> Tensor:
        """What is here of the frozen matrix: (outputs here, inputs here); of experts (experts here, ...)."""
        ...

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        """x (outputs here,), or of experts (experts here, outputs here), -> what each row of `like` (T, outputs here)
        has of it. Called from `delta` or `combine`."""
        ...

    def dropping(self, p: float) -> Callable[[Tensor], Tensor] | None:
        """Dropout of the matrix's input (T, inputs here), without gradients, by a mask that is a function of the seed,
        the matrix and the tokens: the same at each call and in every layout. None: nothing is dropped now, as outside
        of training. Called from `delta` or `terms`; not of experts, whose tokens only their own rank knows."""
        ...

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """What `dropping` gives of x, with gradients; x, where nothing is dropped."""
        ...

    def sum_over_inputs(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks among which the matrix's inputs are cut: one all-reduce, and none where they are
        whole. No gradient flows through it."""
        ...


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The `lora` section: the method, and beside its name the method's own fields."""

    seam: ClassVar[str] = SEAM  # whose members add fields (base/registry.py)
    named_by: ClassVar[str] = "method"

    method: str = "lora"
    """What is trained beside the frozen weights: lora (Hu et al., 2021), or a method of your own as
    PACKAGE.MODULE:NAME. Its own fields stand beside this one."""
    targets: list[str] = field(default_factory=lambda: ["*"])
    """Globs of Hugging Face names of linears' weights that get an adapter, such as "*.q_proj.weight"; of what else they
    fit, nothing is trained."""
    also: list[str] = field(default_factory=list)
    """Globs of names of the model's own weights that are trained whole, such as "*norm*" (PEFT's modules_to_save)."""
    init_from: str | None = None
    """Adapters that the run starts from: a folder of PEFT, or a run or checkpoint with adapters of the same shapes;
    unset: new ones."""
    base: Literal["bf16", "int8", "fp8", "int4", "nf4"] = "bf16"
    """How the frozen weights of linears are kept in memory: bf16 (as train.precision computes with them), or
    quantized, and decoded while a layer runs (QLoRA): int8, fp8 (E4M3), int4, nf4 (QLoRA's, with double
    quantization)."""


class Adapter(ABC):
    """A method's weights of one global matrix: q, k and v apart, gate and up apart. The experts of a layer are stacked:
    one Adapter, whose weights hold a global tensor of each expert. Name it with `@adapter("name")` or by `module:NAME`.

    Weights are made in `__init__` by `self.down` and `self.up`, and are called by the attribute that they are assigned
    to: `self.lora_A` of `...q_proj.weight` is the global tensor `...q_proj.lora_A.weight`.

    Config      a frozen dataclass of its fields in the `lora` section
    Methods that can be merged into the weights override `merge`. `combine` says how `delta` joins what the frozen
    matrix gives: it is added, unless overridden.

    linear      whether `delta` is linear in x. Experts whose width is cut over ranks (layout.etp) need that: what
                `down` gives of their output matrices is one rank's part of a sum
    peft_type   of PEFT's adapter_config.json, where PEFT has this method with weights of these names; else None
    reads_base  whether `combine` reads the frozen matrix (`piece.weight`): it must be there as plain numbers then
    started     the attributes whose initial values `start` gives
    embeds      whether it can belong to an embedding
    heads       whether it can belong to the head: a LowRankAdapter of one term
    stacks      whether it can belong to experts that are one tensor: `down` and `up` alone, and no `combine`
    """

    Config: ClassVar[Any] = AdapterConfig  # of a subclass: its dataclass, with the shared fields beside its own
    linear: ClassVar[bool] = False
    peft_type: ClassVar[str | None] = None
    reads_base: ClassVar[bool] = False
    started: ClassVar[tuple[str, ...]] = ()
    embeds: ClassVar[bool] = False
    heads: ClassVar[bool] = False
    stacks: ClassVar[bool] = False

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "Config" in vars(cls):
            cls.Config = section_of(cls.Config, AdapterConfig)

    def __init__(self, piece: LinearPiece, config: AdapterConfig):
        self.piece = piece
        self.config: Any = config

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        """What is wrong with the fields of `Config`."""
        return []

    @classmethod
    def check_module(cls, config: Any, module: str, outputs: int, inputs: int) -> list[Problem]:
        """What is wrong with them for a matrix of this size. module: its name without `.weight`."""
        return []

    @classmethod
    def check_experts(cls, config: Any, module: str) -> list[Problem]:
        """What is wrong with them for experts. module: name of one of their matrices, without `.weight`."""
        return []

    @classmethod
    def patterns(cls, config: Any) -> dict[str, list[str]]:
        """Regular expressions for the ends of modules' names, by the field that has them: each must fit a target, and
        the experts of a layer all or none."""
        return {}

    @classmethod
    def peft_config(cls, config: Any) -> dict[str, Any]:
        """The keys of adapter_config.json that are the method's own."""
        return {}

    @classmethod
    def start(cls, config: Any, module: str, weight: Tensor) -> dict[str, Tensor]:
        """Initial values that depend on the frozen matrix: of whole global tensors, by the attribute that has them, of
        those in `started`. Others are initialized as `down` and `up` were told. module: the matrix's name without
        `.weight`; weight (outputs, inputs) as the run uses it, in float64."""
        return {}

    @classmethod
    def merge(cls, config: Any, module: str, weight: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """The matrix (outputs, inputs) that does what the frozen `weight` and the adapter do together. own: the
        adapter's global tensors by attribute; all in float64. NotImplementedError, unless overridden."""
        raise NotImplementedError(f"{cls.__qualname__} cannot be merged into the weights")

    @classmethod
    def merges(cls) -> bool:
        """Whether it can be merged."""
        return cls.merge.__func__ is not Adapter.merge.__func__  # type: ignore[attr-defined]

    @classmethod
    def combines(cls) -> bool:
        """Whether it overrides `combine`."""
        return cls.combine is not Adapter.combine

    def combine(self, base: Tensor, delta: Tensor) -> Tensor:
        """What the linear gives, without its bias: (T, outputs here) of what the frozen matrix gives, and of `delta`.
        It must be linear in both. Where the inputs of experts' matrices are cut over ranks, both are parts of a
        sum."""
        return base + delta

    @classmethod
    def for_peft(cls, config: Any, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a matrix's adapter, by attribute, as PEFT reads them with `peft_config`, where that is not how
        they are saved."""
        return own

    @classmethod
    def as_peft_reads(cls, config: Any) -> bool:
        """Whether they are saved as PEFT reads them."""
        return cls.peft_type is not None

    @classmethod
    def from_peft(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of the `lora` section that adapters of such an adapter_config.json need, as far as it says."""
        return {}

    def settle(self) -> None:
        """Called before the first use of weights that have changed, on all ranks that share the matrix, while its
        weights are there: in training once in each step, for generation once. What depends on the weights alone may be
        computed here instead of in each forward. CUDA graphs read it, so it keeps its place in memory."""
        return None

    @abstractmethod
    def delta(self, x: Tensor) -> Tensor:
        """What is added to the linear's output: (T, outputs here) of x (T, inputs here), made by calling what `down`
        and `up` returned. Do not ask the device for values (`item`, `if tensor`): that makes the host wait."""

    def down(self, piece: LinearPiece, rank: int, init: AdapterInit = "kaiming", trained: bool = True) -> LocalLinear:
        """A linear from the matrix's inputs to `rank` features, sharded as the inputs are: what it gives is whole, of
        some of the tokens. One that is not `trained` keeps its initial weight."""
        return piece.down(rank, init, trained)

    def up(self, piece: LinearPiece, rank: int, init: AdapterInit = "zeros", trained: bool = True) -> LocalLinear:
        """A linear from `rank` features, of the tokens that `down` gives, to the matrix's outputs, sharded as these
        are."""
        return piece.up(rank, init, trained)

    def per_output(self, piece: LinearPiece, init: Init) -> LocalVector:
        """A trained number for each of the matrix's outputs, sharded as these are. Its name has no `.weight` at the
        end."""
        return piece.per_output(init)


@dataclass(frozen=True)
class LowRankTerm:
    """scale * up(down(x)), of what the adapter's `down` and `up` have made; x with dropout in training."""

    down: LocalLinear
    up: LocalLinear
    scale: float
    dropout: float = 0.0


class LowRankAdapter(Adapter):
    """One whose delta is a sum of terms, which are added to the linear's output in its own memory
    (ops/dense/low_rank.py) where `combine` is not overridden either."""

    linear = True

    @abstractmethod
    def terms(self) -> Sequence[LowRankTerm]: ...

    def delta(self, x: Tensor) -> Tensor:
        first, *others = self.terms()
        found = self._of(first, x)
        for term in others:
            found = found + self._of(term, x)
        return found

    def _of(self, term: LowRankTerm, x: Tensor) -> Tensor:
        x = self.piece.dropout(x, term.dropout) if term.dropout else x
        return term.up(term.down(x)) * term.scale

    @classmethod
    def adds_terms(cls) -> bool:
        """Whether nothing but its terms is added."""
        return cls.delta is LowRankAdapter.delta and not cls.combines()


V = TypeVar("V")


def by_pattern(patterns: Mapping[str, V], module: str, otherwise: V) -> V:
    """The value of the first pattern that fits the end of a module's name, after a dot or whole, as in PEFT."""
    return next((value for pattern, value in patterns.items() if fits_module(pattern, module)), otherwise)


def fits_module(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


T = TypeVar("T", bound=type[Adapter])


def adapter(name: str) -> Callable[[T], T]:
    """Name an Adapter, so that `lora.method` may be that name wherever its module has been imported."""
    return registers(SEAM, name)


def find_adapter(name: str) -> type[Adapter]:
    """The method that `lora.method` means. NotFound says what is wrong with it."""
    found: type[Adapter] = find(SEAM, name, Adapter)
    return found


def completed_lora(config: AdapterConfig) -> AdapterConfig:
    """As base.registry.completed, of the `lora` section."""
    return completed("lora", config, AdapterConfig, find_adapter)
