"""Rules of the `model` section: shapes against each other, against tensor parallelism and against the sequence length."""

from __future__ import annotations

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, multiples, problem, within
from phalanx.models.config import GPT2Config, LlamaConfig, RopeScaling


def check(config: LlamaConfig | GPT2Config, *, tp: int, seq_length: int) -> list[Problem]:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    found = at_least("model", config, 1, *sizes) + within("model", config, "initializer_range", "[0, inf)")
    family = check_llama(config) if isinstance(config, LlamaConfig) else check_gpt2(config, seq_length)
    found += family
    if not found and tp >= 1:
        found += check_tensor_parallel(config, tp)
    return found


def check_llama(config: LlamaConfig) -> list[Problem]:
    found = at_least("model", config, 1, "num_key_value_heads", "head_dim")
    found += within("model", config, "rms_norm_eps", "(0, inf)") + within("model", config, "rope_theta", "(0, inf)")
    if config.rope_scaling is not None:
        found += check_rope_scaling(config.rope_scaling)
    if found or min(config.hidden_size, config.num_attention_heads) < 1:
        return found
    return check_heads(config) + check_head_dim(config)


def check_heads(config: LlamaConfig) -> list[Problem]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % kv_heads == 0:
        return []
    because = {"model.num_attention_heads": heads}
    return [problem("model", config, "num_key_value_heads", "must divide num_attention_heads", because, divisors(kv_heads, heads))]


def check_head_dim(config: LlamaConfig | GPT2Config) -> list[Problem]:
    """Rotary embeddings turn pairs of features, so a head has an even number of them."""
    heads, given, rotary = config.num_attention_heads, getattr(config, "head_dim", None), isinstance(config, LlamaConfig)
    because = {"model.num_attention_heads": heads}
    valid = multiples(config.hidden_size, 2 * heads if rotary else heads)
    if given is not None:
        rule = "must be even (rotary embedding turns pairs)"
        return [problem("model", config, "head_dim", rule, {}, multiples(given, 2))] if given % 2 else []
    if config.hidden_size % heads:
        unless = " unless head_dim is set" if rotary else ""
        return [problem("model", config, "hidden_size", f"must be a multiple of num_attention_heads{unless}", because, valid)]
    if rotary and config.hidden_size // heads % 2:
        because["head_dim"] = config.hidden_size // heads
        return [problem("model", config, "hidden_size", "must give an even head_dim (rotary embedding turns pairs)", because, valid)]
    return []


def check_rope_scaling(config: RopeScaling) -> list[Problem]:
    at = "model.rope_scaling"
    found = at_least(at, config, 1, "original_max_position_embeddings")
    for name, valid in (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0)):
        found += within(at, config, name, "(0, inf)", (valid,))
    if not found and config.high_freq_factor <= config.low_freq_factor:
        because = {f"{at}.low_freq_factor": config.low_freq_factor}
        found.append(problem(at, config, "high_freq_factor", "must be > low_freq_factor", because, (4 * config.low_freq_factor,)))
    return found


def check_gpt2(config: GPT2Config, seq_length: int) -> list[Problem]:
    found = within("model", config, "layer_norm_epsilon", "(0, inf)")
    for name in ("dropout", "attention_dropout"):
        found += within("model", config, name, "[0, 1)", (0.0, 0.1))
    if min(config.hidden_size, config.num_attention_heads) >= 1:
        found += check_head_dim(config)
    if seq_length > config.max_position_embeddings >= 1:
        because = {"model.max_position_embeddings": config.max_position_embeddings}
        rule = "must be <= max_position_embeddings (positions are learned)"
        found.append(Problem("train.seq_length", seq_length, rule, because, (config.max_position_embeddings,)))
    return found


def check_tensor_parallel(config: LlamaConfig | GPT2Config, tp: int) -> list[Problem]:
    """Heads are cut whole; few key/value heads are shared by runs of ranks; each rank holds part of the vocabulary and of the MLP."""
    found = []
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % tp:
        because = {"model.num_attention_heads": heads}
        found.append(Problem("layout.tp", tp, "must divide num_attention_heads", because, divisors(tp, heads)))
    if kv_heads != heads and kv_heads % tp and tp % kv_heads:
        because = {"model.num_key_value_heads": kv_heads}
        found.append(Problem("layout.tp", tp, "must divide num_key_value_heads or be a multiple of it", because, divisors(tp, heads)))
    for name in ("vocab_size", "intermediate_size"):
        size = getattr(config, name)
        if size is not None and size < tp:
            found.append(Problem("layout.tp", tp, f"must be <= {name}", {f"model.{name}": size}, divisors(tp, heads)))
    return found
