"""The modules that models are built from. Names here are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.nn.attention import Attention, AttentionSpec
    from phalanx.nn.cross_attention import CrossAttention
    from phalanx.nn.embedding import Embedding
    from phalanx.nn.env import Env
    from phalanx.nn.head import Head
    from phalanx.nn.initial import Constant, Normal, Uniform
    from phalanx.nn.linear import ColumnLinear, GroupedLinear, ReplicatedLinear, RowLinear
    from phalanx.nn.mla import LatentAttention
    from phalanx.nn.mlp import GeluMLP, SwiGLU
    from phalanx.nn.module import Block, Module, OutputRows
    from phalanx.nn.moe import MoE
    from phalanx.nn.mtp import MultiTokenPrediction
    from phalanx.nn.norm import LayerNorm, RMSNorm
    from phalanx.nn.parameter import Parameter
    from phalanx.nn.query_temperature import QueryTemperature
    from phalanx.nn.relative_bias import BiasSpec, RelativeBiasTable
    from phalanx.nn.rotary import Rotary

FILES = {
    "attention": ("Attention", "AttentionSpec"),
    "cross_attention": ("CrossAttention",),
    "embedding": ("Embedding",),
    "env": ("Env",),
    "head": ("Head",),
    "initial": ("Constant", "Normal", "Uniform"),
    "linear": ("ColumnLinear", "GroupedLinear", "ReplicatedLinear", "RowLinear"),
    "mla": ("LatentAttention",),
    "mlp": ("GeluMLP", "SwiGLU"),
    "module": ("Block", "Module", "OutputRows"),
    "moe": ("MoE",),
    "mtp": ("MultiTokenPrediction",),
    "norm": ("LayerNorm", "RMSNorm"),
    "parameter": ("Parameter",),
    "query_temperature": ("QueryTemperature",),
    "relative_bias": ("BiasSpec", "RelativeBiasTable"),
    "rotary": ("Rotary",),
}
__all__ = [
    "Attention",
    "AttentionSpec",
    "BiasSpec",
    "Block",
    "ColumnLinear",
    "Constant",
    "CrossAttention",
    "Embedding",
    "Env",
    "GeluMLP",
    "GroupedLinear",
    "Head",
    "LatentAttention",
    "LayerNorm",
    "MoE",
    "Module",
    "MultiTokenPrediction",
    "Normal",
    "OutputRows",
    "Parameter",
    "QueryTemperature",
    "RMSNorm",
    "RelativeBiasTable",
    "ReplicatedLinear",
    "Rotary",
    "RowLinear",
    "SwiGLU",
    "Uniform",
]


def __getattr__(name: str) -> Any:
    for file, names in FILES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"phalanx.nn.{file}"), name)
            return value
    raise AttributeError(f"module 'phalanx.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
