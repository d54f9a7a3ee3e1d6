"""LoRA (Hu et al. 2021): y = W x + scale * B(A x). Rank-stabilised LoRA (Kalajdzievski 2023) is another scale.

PiSSA (Meng et al. 2024, "PiSSA: principal singular values and singular vectors adaptation") is another start: A and B
begin as the largest singular values of W with their vectors, and are taken out of W. W itself is left as it is here:
what is taken out stays beside it, as two frozen matrices,

    y = W x + scale * (B(A x) - B0(A0 x))

so that the base's bytes never change, and the four are a LoRA of twice the rank over the base, [A; A0] and [B, -B0].
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, problem, within
from phalanx.nn.adapter import LinearPiece, LowRankAdapter, LowRankTerm, adapter, by_pattern, fits_module

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    rank: int = 16
    """Features between the two small matrices of an adapter."""
    alpha: float = 32.0
    """What the adapter adds is multiplied by alpha / rank."""
    rank_stabilised: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that larger ranks learn as fast (rsLoRA)."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Other ranks of some matrices, by regular expressions that fit the end of a module's name, such as
    {"layers.0.self_attn.q_proj": 32, "down_proj": 8}; the first that fits counts, as in PEFT."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """The same for alpha."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(LowRankConfig):
    start: Literal["random", "pissa"] = "random"
    """random: A as PEFT draws it and B zero; pissa: the largest singular values of each matrix with their vectors,
    which the adapter first takes out of the matrix and then trains (Meng et al., 2024)."""
    dropout: float = 0.0
    """Probability with which each feature of an adapter's input is dropped in training; of pissa, of what is trained.
    An embedding's input has none, and experts cannot have it."""


def scale_of(config: Any, module: str, rank: int) -> float:
    """What a matrix's adapter of this rank is multiplied by."""
    alpha = by_pattern(config.alpha_pattern, module, config.alpha)
    return float(alpha / (math.sqrt(rank) if config.rank_stabilised else rank))


@adapter("lora")
class LoRA(LowRankAdapter):
    """A as PEFT makes it, uniform within 1 / sqrt(inputs), and B zero: the first step begins at the base model. Of an
    embedding A is zero and B normal."""

    Config: ClassVar[Any] = LoRAConfig
    peft_type = "LORA"
    embeds: ClassVar[bool] = True
    heads: ClassVar[bool] = True
    stacks: ClassVar[bool] = True
    started: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B", "start_A", "start_B")

    def __init__(self, piece: LinearPiece, config: Any):
        super().__init__(piece, config)
        module = piece.name.removesuffix(".weight").format(0)  # the experts of a layer are alike
        rank = self.rank_of(config, module)
        if piece.is_embedding:
            self.lora_embedding_A = self.down(piece, rank, init="zeros")
            from phalanx.nn.initial import Normal  # imports torch: a config that names a method is read without it

            self.lora_embedding_B = self.up(piece, rank, init=Normal(1.0))
        else:
            self.lora_A = self.down(piece, rank, init="kaiming")
            self.lora_B = self.up(piece, rank, init="zeros")
        self.scale = scale_of(config, module, rank)
        self.pissa = is_pissa(config)
        self.dropout = config.dropout if isinstance(config, LoRAConfig) else 0.0
        if self.pissa:
            self.start_A = self.down(piece, rank, init="zeros", trained=False)
            self.start_B = self.up(piece, rank, init="zeros", trained=False)

    def terms(self) -> list[LowRankTerm]:
        if self.piece.is_embedding:
            return [LowRankTerm(self.lora_embedding_A, self.lora_embedding_B, self.scale)]
        found = [LowRankTerm(self.lora_A, self.lora_B, self.scale, self.dropout)]
        return [*found, LowRankTerm(self.start_A, self.start_B, -self.scale)] if self.pissa else found

    @classmethod
    def start(cls, config: Any, module: str, weight: Tensor) -> dict[str, Tensor]:
        if not is_pissa(config):
            return {}
        rank = cls.rank_of(config, module)
        first, second = principal(weight, rank, scale_of(config, module, rank))
        return {"lora_A": first, "lora_B": second, "start_A": first, "start_B": second}

    @classmethod
    def rank_of(cls, config: Any, module: str) -> int:
        return by_pattern(config.rank_pattern, module, config.rank)

    @classmethod
    def merge(cls, config: Any, module: str, weight: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        return weight + product_of(config, module, own)

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        found = [*at_least("lora", config, 1, "rank"), *within("lora", config, "alpha", "(0, inf)")]
        found += within("lora", config, "dropout", "[0, 1)") if isinstance(config, LoRAConfig) else []
        for name, least, rule in (
            ("rank_pattern", 1, "must have integers >= 1"),
            ("alpha_pattern", 0, "must have numbers > 0"),
        ):
            patterns = getattr(config, name)
            wrong = {key: v for key, v in patterns.items() if not _is_pattern(key) or v < least or v <= 0}
            if wrong:
                rule = f"{rule}, by regular expressions"
                rest = {key: value for key, value in patterns.items() if key not in wrong}
                found.append(problem("lora", config, name, rule, {"wrong": ", ".join(wrong)}, (rest,)))
        return found

    @classmethod
    def check_module(cls, config: Any, module: str, outputs: int, inputs: int) -> list[Problem]:
        rank = cls.rank_of(config, module)
        if rank <= min(outputs, inputs):
            return []
        because = {"matrix": module, "outputs": outputs, "inputs": inputs}
        if by_pattern(config.rank_pattern, module, None) is None:
            rule = "must be at most the smaller side of each matrix"
            return [problem("lora", config, "rank", rule, because, (min(outputs, inputs),))]
        patterns = {k: min(v, outputs, inputs) if fits_module(k, module) else v for k, v in config.rank_pattern.items()}
        rule = "must have ranks of at most the smaller side of each matrix"
        return [problem("lora", config, "rank_pattern", rule, because, (patterns,))]

    @classmethod
    def check_experts(cls, config: Any, module: str) -> list[Problem]:
        if not isinstance(config, LoRAConfig) or config.dropout == 0.0:
            return []
        rule = "must be 0 on experts: a mask follows from the numbers of the tokens, which are not sent to them"
        return [problem("lora", config, "dropout", rule, {"such as": module}, (0.0,))]

    @classmethod
    def patterns(cls, config: Any) -> dict[str, list[str]]:
        return {"rank_pattern": list(config.rank_pattern), "alpha_pattern": list(config.alpha_pattern)}

    @classmethod
    def as_peft_reads(cls, config: Any) -> bool:
        return not is_pissa(config)

    @classmethod
    def for_peft(cls, config: Any, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not is_pissa(config) or "lora_A" not in own:
            return own
        import torch  # as above

        return {
            "lora_A": torch.cat((own["lora_A"], own["start_A"])),
            "lora_B": torch.cat((own["lora_B"], -own["start_B"]), 1),
        }

    @classmethod
    def from_peft(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "method": "dora" if config.get("use_dora") else "lora",
            "rank": config.get("r", 8),
            "alpha": float(config.get("lora_alpha", 8)),
            "rank_stabilised": bool(config.get("use_rslora")),
            "rank_pattern": config.get("rank_pattern") or {},
            "alpha_pattern": config.get("alpha_pattern") or {},
        }

    @classmethod
    def peft_config(cls, config: Any) -> dict[str, Any]:
        ranks = 2 if is_pissa(config) else 1  # and the scale is the same
        alphas = math.sqrt(ranks) if config.rank_stabilised else ranks
        return {
            "r": ranks * config.rank,
            "lora_alpha": alphas * config.alpha,
            "lora_dropout": config.dropout if isinstance(config, LoRAConfig) else 0.0,
            "use_rslora": config.rank_stabilised,
            "rank_pattern": {key: ranks * value for key, value in config.rank_pattern.items()},
            "alpha_pattern": {key: alphas * value for key, value in config.alpha_pattern.items()},
        }


def is_pissa(config: Any) -> bool:
    return isinstance(config, LoRAConfig) and config.start == "pissa"


def principal(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A (rank, inputs) and B (outputs, rank): scale * B A is the matrix's best approximation of this rank, in equal
    shares of both.

    From the eigenvectors of the smaller of W W^T and W^T W, in float64: the squares cost half of its digits, which the
    start of a training does not need.
    """
    import torch  # as above

    outputs, inputs = weight.shape
    if outputs > inputs:
        b, a = principal(weight.mT, rank, scale)
        return a.mT, b.mT
    squares, vectors = torch.linalg.eigh(weight @ weight.mT)
    values, vectors = squares[-rank:].clamp(min=0).sqrt(), vectors[:, -rank:]
    shares = (values / scale).sqrt()
    rows = vectors.mT @ weight / torch.where(values > 0, values, 1).unsqueeze(1)
    return shares.unsqueeze(1) * rows, vectors * shares


def product_of(config: Any, module: str, own: Mapping[str, Tensor]) -> Tensor:
    """(outputs, inputs) that the two small matrices add to a matrix."""
    if "lora_embedding_A" in own:
        first, second = own["lora_embedding_A"], own["lora_embedding_B"]
        return scale_of(config, module, len(first)) * (second @ first)
    product = own["lora_B"] @ own["lora_A"]
    if is_pissa(config):
        product = product - own["start_B"] @ own["start_A"]
    return scale_of(config, module, len(own["lora_A"])) * product


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return bool(text)
