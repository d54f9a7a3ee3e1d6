"""Rules of the `model` section: those of every family, those of the family itself, and those of tensor parallelism."""

from __future__ import annotations

from dataclasses import fields

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, within
from phalanx.models.model_config import ModelConfig
from phalanx.models.registry import family_of


def check(config: ModelConfig, *, tp: int, seq_length: int) -> list[Problem]:
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    family, own = family_of(config), {f.name for f in fields(config)}  # type: ignore[arg-type]
    found = at_least("model", config, 1, *(name for name in sizes if name in own)) + within(
        "model", config, "initializer_range", "[0, inf)"
    )
    found += family.rules(config, seq_length)
    if not found and tp >= 1:
        found += check_tensor_parallel(config, tp) + family.split_rules(config, tp)
    return found


def check_tensor_parallel(config: ModelConfig, tp: int) -> list[Problem]:
    """Heads are not split; if there are few key/value heads, several consecutive ranks share one; each rank holds part
    of the vocabulary and of the MLP."""
    found = []
    heads, kv_heads = config.num_attention_heads, config.kv_heads
    if heads % tp:
        because = {f"model.{config.heads_field}": heads}
        found.append(Problem("layout.tp", tp, f"must divide {config.heads_field}", because, divisors(tp, heads)))
    if kv_heads != heads and kv_heads % tp and tp % kv_heads:
        because = {f"model.{config.kv_heads_field}": kv_heads}
        rule = f"must divide {config.kv_heads_field} or be a multiple of it"
        found.append(Problem("layout.tp", tp, rule, because, divisors(tp, heads)))
    dense = not all(map(config.has_experts, range(config.num_hidden_layers)))
    dense = dense and any(f.name == "intermediate_size" for f in fields(config))  # type: ignore[arg-type]
    for name in ("vocab_size", *(("intermediate_size",) if dense else ())):
        size = getattr(config, name)
        if size is not None and size < tp:
            found.append(Problem("layout.tp", tp, f"must be <= {name}", {f"model.{name}": size}, divisors(tp, heads)))
    return found
