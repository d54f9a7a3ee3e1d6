"""Mamba-2: every layer is a selective scan behind a norm; no attention, no MLP, no positions. Dao & Gu, "Transformers
are SSMs", 2024."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, problem, within
from phalanx.models.config_json import NEEDED, ConfigJson, HfKey, integer, number, switch, text
from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig, SmallSizes, TensorNames
from phalanx.models.scan_fields import check_steps, limits_of

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env
    from phalanx.nn.state_space import StateSpace


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(ModelConfig):
    family: Literal["mamba2"] = "mamba2"
    """Which model this section describes: mamba2."""
    vocab_size: int
    """Size of the vocabulary; any size at any tp, padding never leaves the ranks."""
    hidden_size: int
    """Width of the residual stream."""
    num_hidden_layers: int
    """Number of layers."""
    num_heads: int
    """Number of heads of a scan; num_heads * head_dim must be expand * hidden_size."""
    head_dim: int = 64
    """Width of a head."""
    state_size: int = 128
    """Features of a head's state."""
    n_groups: int = 8
    """Groups of heads that share what is written to their states and read from them; the norm before the output is over
    the features of a group."""
    expand: int = 2
    """Width of all heads together, in widths of the residual stream."""
    conv_kernel: int = 4
    """Tokens that the convolution before the scan reads: each token and those before it."""
    layer_norm_epsilon: float = 1e-5
    """Epsilon of RMSNorm."""
    use_bias: bool = False
    """The two projections of a layer have biases."""
    use_conv_bias: bool = True
    """The convolution has a bias."""
    time_step_min: float = 0.001
    """Smallest step of a head at the start of training."""
    time_step_max: float = 0.1
    """Largest step of a head at the start of training."""
    time_step_floor: float = 1e-4
    """Steps at the start of training are at least this."""
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    """Steps are kept within these two numbers."""
    tie_word_embeddings: bool = False
    """Use the input embedding as output head."""
    initializer_range: float = 0.1
    """Standard deviation of initial weights."""
    max_position_embeddings: int = 131072
    """Longest text that is generated or embedded. A scan has no positions: this bounds tables, not the model."""

    heads_field: ClassVar[str] = "num_heads"
    kv_heads_field: ClassVar[str] = "n_groups"

    @property  # type: ignore[misc]
    def num_attention_heads(self) -> int:
        return self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.n_groups

    @property
    def head_widths(self) -> tuple[int, int]:
        return self.state_size, self.head_dim

    @property  # type: ignore[misc]
    def intermediate_size(self) -> int:
        """Features of all heads together."""
        return self.expand * self.hidden_size

    @property
    def rotary(self) -> bool:
        return False

    @property
    def taps(self) -> int:
        return self.conv_kernel

    @property
    def attends(self) -> bool:
        return False

    @property
    def gated_mlp(self) -> bool:
        return False


def blocks(config: Mamba2Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.mixer_decoder import mixer_blocks  # imports torch, which reading a config need not

    return mixer_blocks(config, env, NAMES, "backbone.norm_f", mixer)


def mixer(config: Mamba2Config, env: Env, layer: int) -> StateSpace:
    from phalanx.nn.state_space import StateSpace, StateSpaceSpec

    c = config
    spec = StateSpaceSpec(
        name=f"{NAMES.layer.format(layer)}.mixer",
        width=c.hidden_size,
        heads=c.num_heads,
        head_dim=c.head_dim,
        groups=c.n_groups,
        state=c.state_size,
        taps=c.conv_kernel,
        eps=c.layer_norm_epsilon,
        std=c.initializer_range,
        steps=(c.time_step_min, c.time_step_max, c.time_step_floor),
        limits=c.time_step_limit,
        bias=c.use_bias,
        out_bias=c.use_bias,
        conv_bias=c.use_conv_bias,
    )
    return StateSpace(env, spec)


def rules(config: Mamba2Config, seq_length: int) -> list[Problem]:
    c = config
    found = at_least("model", c, 1, "num_heads", "head_dim", "state_size", "n_groups", "expand")
    found += at_least("model", c, 2, "conv_kernel") + within("model", c, "layer_norm_epsilon", "(0, inf)")
    found += check_steps(c)
    if found:
        return found
    if c.num_heads % c.n_groups:
        because, valid = {"model.num_heads": c.num_heads}, divisors(c.n_groups, c.num_heads)
        found.append(problem("model", c, "n_groups", "must divide num_heads", because, valid))
    if c.num_heads * c.head_dim != c.expand * c.hidden_size:
        because = {"expand * hidden_size": c.expand * c.hidden_size, "model.head_dim": c.head_dim}
        whole = c.expand * c.hidden_size
        fits = whole % c.head_dim == 0 and whole // c.head_dim % c.n_groups == 0
        rule = "num_heads * head_dim must be expand * hidden_size"
        found.append(problem("model", c, "num_heads", rule, because, (whole // c.head_dim,) if fits else ()))
    return found


SAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_heads",
    "head_dim",
    "state_size",
    "n_groups",
    "expand",
    "conv_kernel",
    "layer_norm_epsilon",
    "use_bias",
    "use_conv_bias",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "tie_word_embeddings",
    "initializer_range",
    "max_position_embeddings",
)
KEYS = {
    "vocab_size": integer(NEEDED),
    "hidden_size": integer(NEEDED),
    "num_hidden_layers": integer(NEEDED),
    "num_heads": integer(NEEDED),
    "head_dim": integer(64),
    "state_size": integer(128),
    "n_groups": integer(8),
    "expand": integer(2),
    "conv_kernel": integer(4),
    "layer_norm_epsilon": number(1e-5),
    "use_bias": switch(False),
    "use_conv_bias": switch(True),
    "hidden_act": text("silu"),
    "time_step_min": number(0.001),
    "time_step_max": number(0.1),
    "time_step_floor": number(1e-4),
    "time_step_limit": HfKey((list,), [0.0, math.inf]),
    "tie_word_embeddings": switch(False),
    "initializer_range": number(0.1),
    "max_position_embeddings": integer(131072),
}


def from_hf(found: ConfigJson) -> Mamba2Config | None:
    limits = limits_of(found)
    return None if found.odd else Mamba2Config(**found.pick(*SAME), time_step_limit=limits)


def to_hf(config: Mamba2Config) -> dict[str, Any]:
    return {
        **{name: getattr(config, name) for name in SAME},
        "time_step_limit": list(config.time_step_limit),
        "hidden_act": "silu",
        "rms_norm": True,
        "residual_in_fp32": True,
        "chunk_size": 256,
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    """All fields are already explicit."""
    return model


def shrink(config: Mamba2Config, small: SmallSizes) -> Mamba2Config:
    """Heads and groups keep their relation to the ranks; a head's width follows from the width of the model."""
    heads = small.heads
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        num_hidden_layers=small.layers,
        num_heads=heads,
        head_dim=config.expand * small.hidden_size // heads,
        state_size=min(config.state_size, 6),
        conv_kernel=min(config.conv_kernel, 3),  # chunks of a short sequence on many ranks have few tokens
        n_groups=small.kv_heads,
    )


NAMES = TensorNames(
    prefix="backbone.",
    embedding="backbone.embeddings.weight",
    layer="backbone.layers.{}",
    also=("backbone.layers.0.mixer.dt_bias",),
    renames={"backbone.embedding.weight": "backbone.embeddings.weight"},
)
FAMILY = Family(
    "mamba2",
    Mamba2Config,
    blocks,
    architecture="Mamba2ForCausalLM",
    tensors=NAMES,
    rules=rules,
    keys=KEYS,
    only={"hidden_act": ("silu", "swish")},
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    shrink=shrink,
)
