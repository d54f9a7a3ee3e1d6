"""The Adapter protocol: what a file must say to add a method of fine-tuning by small trained weights beside frozen
ones, such as LoRA.

How the weights are sharded, what travels between ranks and where they are saved is no concern of it
(nn/adapted_linear.py). Torch is not imported here: a config that names a method is read without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

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


LocalLinear = Callable[["Tensor"], "Tensor"]


class LinearPiece(Protocol):
    """A global matrix that an adapter belongs to.

    name             its global name; of experts `{}` stands for the number
    outputs, inputs  its whole size
    """

    @property
    def name(self) -> str: ...

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    def down(self, rank: int, init: AdapterInit) -> LocalLinear:
        """As Adapter.down."""
        ...

    def up(self, rank: int, init: AdapterInit) -> LocalLinear:
        """As Adapter.up."""
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
    linear      whether `delta` is linear in x. Experts whose width is cut over ranks (layout.etp) need that: what
                `down` gives of their output matrices is one rank's part of a sum
    peft_type   of PEFT's adapter_config.json, where PEFT has this method with weights of these names; else None
    """

    Config: ClassVar[Any] = AdapterConfig  # of a subclass: its dataclass, with the shared fields beside its own
    linear: ClassVar[bool] = False
    peft_type: ClassVar[str | None] = None

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
    def peft_config(cls, config: Any) -> dict[str, Any]:
        """The keys of adapter_config.json that are the method's own."""
        return {}

    @abstractmethod
    def delta(self, x: Tensor) -> Tensor:
        """What is added to the linear's output: (T, outputs here) of x (T, inputs here), made by calling what `down`
        and `up` returned. Do not ask the device for values (`item`, `if tensor`): that makes the host wait."""

    def down(self, piece: LinearPiece, rank: int, init: AdapterInit = "kaiming") -> LocalLinear:
        """A linear from the matrix's inputs to `rank` features, sharded as the inputs are: what it gives is whole, of
        some of the tokens."""
        return piece.down(rank, init)

    def up(self, piece: LinearPiece, rank: int, init: AdapterInit = "zeros") -> LocalLinear:
        """A linear from `rank` features, of the tokens that `down` gives, to the matrix's outputs, sharded as these
        are."""
        return piece.up(rank, init)


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
