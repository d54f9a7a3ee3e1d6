"""The `model` section from Megatron-LM's arguments: which family has the same layers, and its sizes.

Where no family has all of a model's traits, the nearest is taken and every trait that it lacks is listed. A model that
differs in more than two traits, in two of those in ESSENTIAL, or in having experts or latent attention, gets no family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.config.importers.translation import (
    BuiltIn,
    ByValue,
    Missing,
    Refused,
    Rule,
    Translation,
    number,
    real,
    whole,
)
from phalanx.config.validate import families

TITLE = "Megatron-LM"
YES, NO = "yes", "no"


@dataclass(frozen=True)
class Trait:
    """One property of a model. keys: of theirs that decide it; says: what it is, for messages."""

    value: str
    keys: tuple[str, ...]
    says: str


def traits_of(t: Translation) -> dict[str, Trait]:
    """The traits of a model of pretrain_gpt.py."""
    window = t.has("--window-size")
    experts = t.has("--num-experts")
    made = {
        "positions": positions(t),
        "norm": norm(t),
        "mlp": activation(t),
        "attention": attention(t),
        "router": router(t),
        "bias": flag(t, "--disable-bias-linear", "biases of linears", given=NO, absent=YES),
        "qkv bias": flag(t, "--add-qkv-bias", "biases of queries, keys and values"),
        "head norm": flag(t, "--qk-layernorm", "norms of queries and keys"),
        "window": Trait(YES if window else NO, ("--window-size",), "a window in attention"),
        "rotated part": part(t),
        "groups": groups(t),
        "shared expert": flag(t, "--moe-shared-expert-intermediate-size", "a shared expert"),
        "dropout": dropout(t),
        "dense layers": Trait(
            YES if experts and dense_layers(t) else NO, ("--moe-layer-freq",), "layers with no experts"
        ),
        "sinks": Trait(
            NO if t.value("--softmax-type", "vanilla") == "vanilla" else YES, ("--softmax-type",), "attention sinks"
        ),
        "width": Trait(YES if narrow_experts(t) else NO, ("--moe-ffn-hidden-size",), "experts of a width of their own"),
    }
    return made


def flag(t: Translation, name: str, says: str, given: str = YES, absent: str = NO) -> Trait:
    return Trait(given if t.has(name) else absent, (name,), says)


def norm(t: Translation) -> Trait:
    """Megatron-DeepSpeed writes it in small letters."""
    kind = str(t.value("--normalization", "LayerNorm"))
    known = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
    return Trait(known.get(kind.lower(), kind), ("--normalization",), "norms")


def positions(t: Translation) -> Trait:
    kind = str(t.value("--position-embedding-type", "learned_absolute"))
    if t.has("--use-rotary-position-embeddings") or kind == "yarn" or t.has("--no-position-embedding"):
        kind = "rope" if kind != "none" else kind
    keys = ("--position-embedding-type", "--use-rotary-position-embeddings", "--no-position-embedding")
    return Trait({"learned_absolute": "learned"}.get(kind, kind), keys, "positions")


def activation(t: Translation) -> Trait:
    kinds = {"--swiglu": "SwiGLU", "--squared-relu": "squared ReLU", "--quick-geglu": CLAMPED}
    found = [name for name in kinds if t.has(name)]
    return Trait(kinds[found[0]] if found else "GELU", tuple(found[:1]), "the MLP's activation")


def attention(t: Translation) -> Trait:
    name = "--multi-latent-attention"
    return Trait("latent" if t.has(name) else "heads", (name,), "attention")


def router(t: Translation) -> Trait:
    keys = ("--num-experts", "--moe-router-score-function", "--moe-router-enable-expert-bias")
    score = str(t.value("--moe-router-score-function", "softmax"))
    return Trait(score if t.has("--num-experts") else "none", keys, "the router")


def part(t: Translation) -> Trait:
    return Trait(NO if fraction(t) == 1.0 else YES, ("--rotary-percent",), "heads that are rotated in part")


def fraction(t: Translation) -> float:
    try:
        return real(t.value("--rotary-percent", 1.0))
    except Refused:
        return 1.0


def groups(t: Translation) -> Trait:
    keys = ("--group-query-attention", "--num-query-groups", OLD_GROUPS)
    named = t.value(OLD_GROUPS) if t.has(OLD_GROUPS) else t.value(keys[1], "1")
    shared = (t.has(keys[0]) or t.has(OLD_GROUPS)) and named != t.value("--num-attention-heads")
    return Trait(YES if shared else NO, keys, "fewer keys than queries")


OLD_GROUPS = "--num-key-value-heads"  # of Megatron-DeepSpeed
DROPOUT = {"--hidden-dropout": "dropout", "--attention-dropout": "attention_dropout"}


def dropout(t: Translation) -> Trait:
    """Their default is 0.1 for both."""
    try:
        there = [real(t.value(name, 0.1)) for name in DROPOUT]
    except Refused:
        there = [0.1]
    return Trait(YES if any(there) else NO, tuple(DROPOUT), "dropout")


def layer_pattern(text: Any, layers: int) -> list[int]:
    """`2` or `([0]*3+[1]*58)`: for each layer, whether it has experts. Refused if it is something else."""
    plain = str(text).strip("'\" ")
    if re.fullmatch(r"\d+", plain):
        return [int(i % max(1, int(plain)) == 0) for i in range(layers)]
    made: list[int] = []
    for term in re.sub(r"[\s()]", "", plain).split("+"):
        found = re.fullmatch(r"\[([01,]*)\](?:\*(\d{1,5}))?", term)
        if found is None:
            raise Refused(f"is no pattern of layers that can be read: {plain}")
        made += [int(n) for n in found[1].split(",") if n] * int(found[2] or 1)
    return made


def dense_layers(t: Translation) -> list[int]:
    """The layers that have no experts."""
    try:
        layers = whole(t.value("--num-layers", 0))
        return [i for i, kind in enumerate(layer_pattern(t.value("--moe-layer-freq", 1), layers)) if not kind]
    except Refused:
        return []


def narrow_experts(t: Translation) -> bool:
    name = "--moe-ffn-hidden-size"
    return t.has(name) and t.value(name) != t.value("--ffn-hidden-size")


CLAMPED = "clamped GLU"
# what each family has: trait -> values; a trait that is not named may have any value
LLAMA_LIKE = {
    "positions": ("rope",),
    "norm": ("RMSNorm",),
    "mlp": ("SwiGLU",),
    "attention": ("heads",),
    "router": ("none",),
    "bias": (NO,),
    "qkv bias": (NO,),
    "head norm": (NO,),
    "window": (NO,),
    "rotated part": (NO,),
    "dropout": (NO,),
    "sinks": (NO,),
}
EXPERTS = {**LLAMA_LIKE, "router": ("softmax",), "shared expert": (NO,)}
GPT = {
    "norm": ("LayerNorm",),
    "mlp": ("GELU",),
    "attention": ("heads",),
    "router": ("none",),
    "bias": (YES,),
    "head norm": (NO,),
    "window": (NO,),
    "groups": (NO,),
    "sinks": (NO,),
}
FAMILIES: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "gpt2": {**GPT, "positions": ("learned",)},
        "gpt_neox": {**GPT, "positions": ("rope",)},
        "llama": LLAMA_LIKE,
        "mistral": {**LLAMA_LIKE, "window": (YES,)},
        "qwen2": {**LLAMA_LIKE, "qkv bias": (YES,), "window": (YES, NO)},
        "qwen3": {**LLAMA_LIKE, "head norm": (YES,), "window": (YES, NO)},
        "phi3": {**LLAMA_LIKE, "rotated part": (YES,), "window": (YES, NO)},
        "mixtral": {**EXPERTS, "window": (YES, NO), "dense layers": (NO,), "width": (NO,)},
        "qwen3_moe": {**EXPERTS, "head norm": (YES,), "window": (YES, NO)},
        "gpt_oss": {
            **EXPERTS,
            "mlp": (CLAMPED,),
            "bias": (YES,),
            "qkv bias": (YES, NO),
            "window": (YES,),
            "sinks": (YES,),
            "dense layers": (NO,),
            "width": (NO,),
        },
        "glm4_moe": {
            **LLAMA_LIKE,
            "router": ("sigmoid",),
            "qkv bias": (YES, NO),
            "head norm": (YES, NO),
            "rotated part": (YES, NO),
        },
        "deepseek_v3": {**LLAMA_LIKE, "attention": ("latent",), "router": ("sigmoid", "none"), "head norm": (YES, NO)},
    }
)
MOST_LACKING = 2
ESSENTIAL = ("positions", "norm", "mlp", "attention", "router")


def lacks(family: str, traits: Mapping[str, Trait]) -> list[str]:
    """The traits of a model that a family does not have."""
    wanted = FAMILIES[family]
    return [name for name, trait in traits.items() if name in wanted and trait.value not in wanted[name]]


def nearest(traits: Mapping[str, Trait]) -> str | None:
    """The family that lacks least, essential traits first; None if it lacks two of those."""

    def distance(family: str) -> tuple[int, int]:
        missing = lacks(family, traits)
        dense = "none" in (*FAMILIES[family]["router"], traits["router"].value)
        essential = sum(name in ESSENTIAL for name in missing)
        return essential + ("attention" in missing) + ("router" in missing and dense), len(missing)

    best = min(FAMILIES, key=distance)
    essential, all_of_them = distance(best)
    return best if essential < 2 and all_of_them <= MOST_LACKING else None


# ---- the section ---------------------------------------------------------------------------------


def translate_model(t: Translation, script: str) -> None:
    """Set the model section. script: the name of the program that the arguments are for."""
    kind = kind_of(t, script)
    if kind in ("bert", "t5"):
        pair_of_stacks(t, kind)
        return
    traits = traits_of(t)
    if kind == "hybrid":
        return translate_hybrid(t, traits)
    family = nearest(traits) if kind == "gpt" else None
    if family is None:
        return no_family(t, traits, kind)
    missing = lacks(family, traits)
    keys = [key for name, trait in traits.items() if name not in missing for key in trait.keys]
    t.set("model.family", family, *keys, origin="the arguments of the model")
    for name in missing:
        lack(t, traits[name], family, FAMILIES[family][name])
    common_sizes(t, family, missing)
    for own in (attention_sizes, norm_and_positions, expert_sizes, latent_sizes, clamped_sizes):
        own(t, family, missing)
    t.apply(MODEL_RULES)


OTHERS = {
    "mamba": "a script for state-space models (nemotron_h is imported where --hybrid-override-pattern is given)",
    "vision": "images",
    "vlm": "images",
    "retro": "retrieval in the layers",
    "mimo": "several encoders",
}


def kind_of(t: Translation, script: str) -> str:
    """gpt, bert, t5, hybrid, or the name in OTHERS of what is not here."""
    name = script.rpartition("/")[2].lower()
    if t.has("--bert-no-binary-head") or "bert" in name:
        return "bert"
    if t.has("--decoder-num-layers") or t.has("--decoder-seq-length") or "t5" in name:
        return "t5"
    if t.has("--hybrid-override-pattern") or t.has("--hybrid-layer-pattern"):
        return "hybrid"
    return next((other for other in OTHERS if other in name), "gpt")


KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}  # of a pattern's letters
HYBRID = {
    "positions": ("none",),
    "norm": ("RMSNorm",),
    "mlp": ("squared ReLU",),
    "attention": ("heads",),
    "bias": (NO,),
    "qkv bias": (NO,),
    "head norm": (NO,),
    "window": (NO,),
    "dropout": (NO,),
    "sinks": (NO,),
}


def translate_hybrid(t: Translation, traits: Mapping[str, Trait]) -> None:
    """Layers of scans, attention and MLPs, as Nemotron-H has them."""
    missing = [name for name, has in HYBRID.items() if traits[name].value not in has]
    keys = [key for name in HYBRID if name not in missing for key in traits[name].keys]
    t.set("model.family", "nemotron_h", "--is-hybrid-model", *keys, origin="the arguments of the model")
    for name in missing:
        lack(t, traits[name], "nemotron_h", HYBRID[name])
    for key in traits["router"].keys:
        if t.has(key):
            t.missing(key, "experts of hybrids are not read from here: model.n_routed_experts and others say them")
    pattern = t.first("--hybrid-override-pattern", "--hybrid-layer-pattern")
    t.set("model.layers_block_type", lambda: kinds_of(t.value(pattern)), pattern)
    ratios = ("--hybrid-attention-ratio", "--hybrid-mlp-ratio")
    t.apply(dict.fromkeys(ratios, BuiltIn("the pattern of layers says it")))
    required(t, "model.num_hidden_layers", "--num-layers")
    required(t, "model.hidden_size", "--hidden-size")
    required(t, "model.num_attention_heads", "--num-attention-heads")
    t.set("model.intermediate_size", lambda: inner_width(t), "--ffn-hidden-size")
    groups, size = ("--group-query-attention", "--num-query-groups"), "--kv-channels"
    heads = "--num-attention-heads"
    t.set("model.num_key_value_heads", lambda: whole(t.value(groups[1] if t.has(groups[0]) else heads, 1)), *groups)
    t.set(
        "model.head_dim",
        lambda: whole(t.value(size, whole(t.value("--hidden-size", 0)) // max(1, whole(t.value(heads, 1))))),
        size,
    )
    width, count = "--mamba-head-dim", "--mamba-num-heads"
    t.set("model.mamba_head_dim", lambda: whole(t.value(width, 64)), width)
    t.set(
        "model.mamba_num_heads",
        lambda: whole(t.value(count, 2 * whole(t.value("--hidden-size", 0)) // whole(t.value(width, 64)))),
        count,
    )
    t.set("model.ssm_state_size", lambda: whole(t.value("--mamba-state-dim", 128)), "--mamba-state-dim")
    t.set("model.n_groups", lambda: whole(t.value("--mamba-num-groups", 8)), "--mamba-num-groups")
    t.set("model.layer_norm_epsilon", lambda: real(t.value("--norm-epsilon", 1e-5)), "--norm-epsilon")
    longest = t.first("--max-position-embeddings", "--seq-length")
    required(t, "model.max_position_embeddings", longest)
    vocabulary(t)
    untied = "--untie-embeddings-and-output-weights"
    if t.has(untied):
        t.apply({untied: BuiltIn("nemotron_h is never tied")})
    else:
        t.differ("a head that is the input embedding", "nemotron_h is never tied")
    t.set("model.initializer_range", lambda: real(t.value("--init-method-std", 0.02)), "--init-method-std")
    t.differ("initial output projections divided by sqrt(2 * layers)", "nemotron_h draws all with one deviation")
    t.apply(MODEL_RULES)


def kinds_of(pattern: Any) -> list[str]:
    """Refused for a letter of a layer that cannot be read from here."""
    plain = str(pattern).strip("'\" ")
    other = next((letter for letter in plain if letter not in KINDS), None)
    if other is not None or not plain:
        raise Refused(f"has a layer {other!r}; those that are read are {', '.join(KINDS)}")
    return [KINDS[letter] for letter in plain]


def no_family(t: Translation, traits: Mapping[str, Trait], kind: str) -> None:
    """No family is near: its traits and sizes are listed."""
    if kind in OTHERS:
        t.by_hand("model.family", f"no family here has {OTHERS[kind]}")
    else:
        best = min(FAMILIES, key=lambda name: len([x for x in lacks(name, traits) if x in ESSENTIAL]))
        what = ", ".join(f"{traits[name].says}: {traits[name].value}" for name in ESSENTIAL)
        t.by_hand("model.family", f"no family here has {what} together; the nearest is {best}")
    for trait in traits.values():
        for key in trait.keys:
            if t.has(key) and not t.settled(key):
                t.missing(key, f"the model has no family here ({trait.says})")
    for key in (*SIZE_KEYS, *MODEL_RULES):
        if t.has(key) and not t.settled(key):
            t.missing(key, "the model has no family here")


def lack(t: Translation, trait: Trait, family: str, has: tuple[str, ...]) -> None:
    """List a trait that the family does not have."""
    says = f"{family} has not: {trait.says}" if set(has) <= {YES, NO} else f"{family} has {' or '.join(has)}"
    if set(has) == {YES}:
        says = f"{family} always has {trait.says}"
    given = [key for key in trait.keys if t.has(key) and not t.settled(key)]
    for key in given:
        t.missing(key, says)
    if not given:
        t.differ(trait.says if trait.value == YES else f"{trait.says}: {trait.value}", says)


SIZE_KEYS = (
    "--num-layers",
    "--hidden-size",
    "--ffn-hidden-size",
    "--num-attention-heads",
    "--num-query-groups",
    "--kv-channels",
    "--max-position-embeddings",
    "--rotary-base",
    "--norm-epsilon",
    "--init-method-std",
    "--untie-embeddings-and-output-weights",
    "--vocab-size",
    "--padded-vocab-size",
    "--make-vocab-size-divisible-by",
)


def has_field(family: str, name: str) -> bool:
    return any(f.name == name for f in fields(families()[family]))


def inner_width(t: Translation) -> int:
    """The width of the MLP: four times that of the model, or with a gate two thirds of that in steps of 64."""
    if t.has("--ffn-hidden-size"):
        return whole(t.value("--ffn-hidden-size"))
    hidden = whole(t.value("--hidden-size", 0))
    return int(4 * hidden * 2 / 3 / 64) * 64 if t.has("--swiglu") else 4 * hidden


def common_sizes(t: Translation, family: str, missing: list[str]) -> None:
    required(t, "model.num_hidden_layers", t.first("--num-layers", "--encoder-num-layers"))
    required(t, "model.hidden_size", "--hidden-size")
    required(t, "model.num_attention_heads", "--num-attention-heads")
    if t.has("--ffn-hidden-size"):
        t.set("model.intermediate_size", lambda: inner_width(t), "--ffn-hidden-size")
    elif t.has("--hidden-size"):
        t.set("model.intermediate_size", lambda: inner_width(t), "--hidden-size", origin=f"default of {TITLE}")
    longest = t.first("--max-position-embeddings", "--seq-length", "--encoder-seq-length")
    required(t, "model.max_position_embeddings", longest)
    vocabulary(t)
    untied = "--untie-embeddings-and-output-weights"
    t.set("model.tie_word_embeddings", not t.has(untied), untied)
    t.set("model.initializer_range", lambda: real(t.value("--init-method-std", 0.02)), "--init-method-std")
    if family not in SCALED_OUTPUTS:
        says = f"{family} draws all its matrices with one standard deviation"
        t.differ("initial output projections divided by sqrt(2 * layers)", says)
    if "dropout" not in missing:
        set_dropout(t, family)


SCALED_OUTPUTS = ("gpt2", "gpt_neox")


def set_dropout(t: Translation, family: str) -> None:
    for key, ours in DROPOUT.items():
        if has_field(family, ours):
            t.set(f"model.{ours}", lambda key=key: real(t.value(key, 0.1)), key)  # type: ignore[misc]


def required(t: Translation, key: str, name: str, convert: Callable[[Any], Any] = whole) -> None:
    if t.has(name):
        t.set(key, lambda: convert(t.value(name)), name)
    else:
        t.by_hand(key, f"{name} is not in the text")


def vocabulary(t: Translation) -> None:
    """Megatron-LM pads the vocabulary, and padding takes part in the softmax; so the padded size is the model's."""
    padded, plain, unit = "--padded-vocab-size", "--vocab-size", "--make-vocab-size-divisible-by"
    tp = t.first("--tensor-model-parallel-size", "--model-parallel-size")
    if t.has(padded):
        t.set("model.vocab_size", lambda: whole(t.value(padded)), padded)
        rules: dict[str, Rule] = {
            plain: BuiltIn("the padded size counts"),
            unit: BuiltIn("the padded size is given; padding for tp never leaves the ranks here"),
        }
        return t.apply(rules)
    if t.has(plain):

        def size() -> int:
            null = t.value("--tokenizer-type") == "NullTokenizer"  # which has one more token, the end of a document
            whole_unit = whole(t.value(unit, 128)) * whole(t.value(tp, 1))
            return -(-(whole(t.value(plain)) + null) // whole_unit) * whole_unit

        return t.set("model.vocab_size", size, plain, unit, tp)
    multiple = t.value(unit, 128)
    says = f"the tokenizer's size, rounded up to a multiple of {multiple} * tp as {TITLE} does"
    t.by_hand("model.vocab_size", says, unit)


def attention_sizes(t: Translation, family: str, missing: list[str]) -> None:
    if "groups" not in missing and has_field(family, "num_key_value_heads") and family != "deepseek_v3":
        keys = ("--group-query-attention", "--num-query-groups")
        if t.has(keys[0]):
            t.set("model.num_key_value_heads", lambda: whole(t.value(keys[1], 1)), *keys)
        elif t.has(OLD_GROUPS):
            t.set("model.num_key_value_heads", lambda: whole(t.value(OLD_GROUPS)), OLD_GROUPS)
        elif t.has(keys[1]) and not t.settled(keys[1]):
            t.built_in(keys[1], "has no effect without --group-query-attention")
    width = "--kv-channels"
    if family == "deepseek_v3":
        t.apply({width: BuiltIn("latent attention has widths of its own: --qk-head-dim and --v-head-dim")})
    elif has_field(family, "head_dim") and family not in ("gpt_neox",):
        heads = ("--hidden-size", "--num-attention-heads")

        def derived() -> int:
            return whole(t.value(heads[0], 0)) // max(1, whole(t.value(heads[1], 1)))

        if t.has(width):
            t.set("model.head_dim", lambda: whole(t.value(width)), width)
        elif all(t.has(name) for name in heads):
            t.set("model.head_dim", derived, *heads, origin=f"default of {TITLE}")
    elif t.has(width):
        same_width(t, width, family)
    if "window" not in missing and t.has("--window-size") and has_field(family, "sliding_window"):
        t.set("model.sliding_window", lambda: window(t.value("--window-size")), "--window-size")
    if family == "glm4_moe":
        t.set("model.use_qk_norm", t.has("--qk-layernorm"), "--qk-layernorm")
        t.set("model.attention_bias", t.has("--add-qkv-bias"), "--add-qkv-bias")


def same_width(t: Translation, width: str, family: str) -> None:
    """A width of heads that the family derives."""
    try:
        derived = whole(t.value("--hidden-size", 0)) // max(1, whole(t.value("--num-attention-heads", 1)))
        fits = whole(t.value(width)) == derived
    except Refused:
        fits = False
    rule: Rule = BuiltIn("hidden_size / num_attention_heads") if fits else Missing(f"in {family} it follows from sizes")
    t.apply({width: rule})


def window(value: Any) -> int:
    """`(127,0)`: so many tokens before a token, and it itself."""
    numbers = re.findall(r"-?\d+", str(value))
    if len(numbers) != 2 or int(numbers[1]) != 0 or int(numbers[0]) < 0:
        raise Refused("only windows that end at the token itself are built")
    return int(numbers[0]) + 1


EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")


def norm_and_positions(t: Translation, family: str, missing: list[str]) -> None:
    wanted = EPSILONS if "norm" in missing or family != "gpt_neox" else EPSILONS[1:]
    field = next(name for name in wanted if has_field(family, name))
    t.set(f"model.{field}", lambda: real(t.value("--norm-epsilon", 1e-5)), "--norm-epsilon")
    if has_field(family, "rope_theta"):
        t.set("model.rope_theta", lambda: real(t.value("--rotary-base", 10000)), "--rotary-base")
    else:
        t.apply(
            {"--rotary-base": BuiltIn("positions are learned"), "--rotary-percent": BuiltIn("positions are learned")}
        )
    if "rotated part" not in missing and has_field(family, "partial_rotary_factor"):
        t.set("model.partial_rotary_factor", fraction(t), "--rotary-percent")
    rope_scaling(t, family)
    if has_field(family, "activation_function"):
        exact = t.has("--no-bias-gelu-fusion") and not t.has("--openai-gelu")
        keys = ("--no-bias-gelu-fusion", "--openai-gelu")
        t.set("model.activation_function", "gelu" if exact else "gelu_new", *keys)
    if family == "gpt_neox":
        t.set("model.use_parallel_residual", False)


def rope_scaling(t: Translation, family: str) -> None:
    if not has_field(family, "rope_scaling"):
        return
    factor = "--rope-scaling-factor"
    if t.has("--use-rope-scaling"):
        llama = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

        def scaled() -> dict[str, Any]:
            return {"rope_type": "llama3", "factor": real(t.value(factor, 8.0)), **llama}

        t.set("model.rope_scaling", scaled, "--use-rope-scaling", factor)
    elif t.has(factor):
        t.built_in(factor, "has no effect without --use-rope-scaling")


# ---- experts -------------------------------------------------------------------------------------

COUNT = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "qwen3_moe": "num_experts"}
SCOPES = {"aux_loss": "micro_batch", "seq_aux_loss": "sequence", "global_aux_loss": "global_batch"}
CAPACITY, DROPS = "--moe-expert-capacity-factor", {"probs": "probability", "position": "position"}
EXPERT_KEYS = (
    "--moe-router-topk",
    "--moe-router-load-balancing-type",
    "--moe-aux-loss-coeff",
    "--moe-z-loss-coeff",
    "--moe-expert-capacity-factor",
    "--moe-token-drop-policy",
    "--moe-ffn-hidden-size",
    "--moe-router-pre-softmax",
)


def expert_sizes(t: Translation, family: str, missing: list[str]) -> None:
    if not has_field(family, "num_experts_per_tok"):
        return
    if not t.has("--num-experts"):
        return no_experts(t, family)
    required(t, f"model.{COUNT.get(family, 'n_routed_experts')}", "--num-experts")
    t.set("model.num_experts_per_tok", lambda: whole(t.value("--moe-router-topk", 2)), "--moe-router-topk")
    if has_field(family, "moe_intermediate_size"):
        width = "--moe-ffn-hidden-size"
        if t.has(width):
            t.set("model.moe_intermediate_size", lambda: whole(t.value(width)), width)
        else:
            t.set(
                "model.moe_intermediate_size", lambda: inner_width(t), "--ffn-hidden-size", origin=f"default of {TITLE}"
            )
    balance(t)
    which_layers(t, family)
    softmax_order(t, family)
    if family in ("glm4_moe", "deepseek_v3"):
        grouped(t)


def no_experts(t: Translation, family: str) -> None:
    """A family with experts for a model without: all its layers are dense."""
    if has_field(family, "first_k_dense_replace") and t.has("--num-layers"):
        t.set("model.first_k_dense_replace", lambda: whole(t.value("--num-layers")), "--num-layers")


def balance(t: Translation) -> None:
    kind, coefficient = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
    named = t.value(kind, "aux_loss")
    off = real(t.value(coefficient, 0.0)) == 0 if not isinstance(t.value(coefficient), list) else False
    if named == "none" or off:
        t.set("model.router_aux_loss_coef", 0.0, kind if named == "none" else coefficient, coefficient)
        t.apply({kind: BuiltIn("its coefficient is 0")})
    else:

        def scope() -> str:
            if str(named) not in SCOPES:
                raise Refused("balancing losses here: aux_loss, seq_aux_loss and global_aux_loss, one at a time")
            return SCOPES[str(named)]

        t.set("model.router_aux_loss_scope", scope, kind)
        t.set("model.router_aux_loss_coef", lambda: real(t.value(coefficient)), coefficient)
    t.set("model.router_z_loss_coef", lambda: real(t.value("--moe-z-loss-coeff", 0.0)), "--moe-z-loss-coeff")
    if t.has(CAPACITY):
        t.set("model.expert_capacity_factor", lambda: real(t.value(CAPACITY)), CAPACITY)
        policy = "--moe-token-drop-policy"
        t.set("model.expert_capacity_drop", lambda: DROPS.get(str(t.value(policy, "probs")), "probability"), policy)
    else:
        t.apply({"--moe-token-drop-policy": BuiltIn(f"has no effect without {CAPACITY}")})
    forced = "--moe-router-force-load-balancing"
    t.set("model.router_forced_balance", t.has(forced), forced)


def which_layers(t: Translation, family: str) -> None:
    name = "--moe-layer-freq"
    if has_field(family, "first_k_dense_replace"):

        def first() -> int:
            dense = dense_layers(t)
            if dense != list(range(len(dense))):
                raise Refused(f"in {family} the layers without experts are the first ones")
            return len(dense)

        t.set("model.first_k_dense_replace", first, name)
    elif has_field(family, "mlp_only_layers") and t.has(name):
        t.set("model.mlp_only_layers", lambda: dense_layers(t), name)


def softmax_order(t: Translation, family: str) -> None:
    """A softmax after the choice of experts is one before it, divided by the sum over those chosen."""
    name = "--moe-router-pre-softmax"
    if has_field(family, "n_routed_experts"):
        t.set("model.norm_topk_prob", True, origin=f"default of {TITLE}")
        t.apply({name: BuiltIn("scores are sigmoids, which know no order")})
    elif has_field(family, "norm_topk_prob"):
        t.set("model.norm_topk_prob", not t.has(name), name)
    else:
        t.apply({name: Missing(f"in {family} the chosen experts' weights add up to one")})


def grouped(t: Translation) -> None:
    shared, width = "--moe-shared-expert-intermediate-size", "--moe-ffn-hidden-size"

    def count() -> int:
        one = whole(t.value(width)) if t.has(width) else inner_width(t)
        if whole(t.value(shared, 0)) % one:
            raise Refused("must be a multiple of the width of an expert")
        return whole(t.value(shared, 0)) // one

    t.set("model.n_shared_experts", count, shared, width)
    pairs = {"--moe-router-num-groups": ("n_group", 1), "--moe-router-group-topk": ("topk_group", 1)}
    for name, (field, default) in pairs.items():
        t.set(f"model.{field}", lambda name=name, default=default: whole(t.value(name, default)), name)  # type: ignore[misc]
    scale = "--moe-router-topk-scaling-factor"
    t.set("model.routed_scaling_factor", lambda: real(t.value(scale, 1.0)), scale)
    bias, rate = "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate"
    t.set("model.router_bias_update_rate", lambda: real(t.value(rate, 1e-3)) if t.has(bias) else 0.0, bias, rate)
    layers, weight = "--mtp-num-layers", "--mtp-loss-scaling-factor"
    t.set("model.num_nextn_predict_layers", lambda: whole(t.value(layers, 0)), layers)
    if t.has(layers):
        t.set("model.mtp_loss_weight", lambda: real(t.value(weight, 0.1)), weight)


LATENT = {
    "--q-lora-rank": ("q_lora_rank", None),
    "--kv-lora-rank": ("kv_lora_rank", 32),
    "--qk-head-dim": ("qk_nope_head_dim", 128),
    "--qk-pos-emb-head-dim": ("qk_rope_head_dim", 64),
    "--v-head-dim": ("v_head_dim", 128),
}


def latent_sizes(t: Translation, family: str, missing: list[str]) -> None:
    """Latent attention: widths, and YaRN, which is its default rotary embedding there."""
    if not has_field(family, "kv_lora_rank"):
        return
    for name, (field, default) in LATENT.items():

        def size(name: str = name, default: int | None = default) -> int | None:
            return whole(t.value(name)) if t.has(name) else default

        t.set(f"model.{field}", size, name)
    factor, mscale, everywhere = "--rotary-scaling-factor", "--mscale", "--mscale-all-dim"
    kind = str(t.value("--rope-type", "yarn"))
    if kind == "yarn" and number(t.value(factor, 1.0)) != 1:

        def yarn() -> dict[str, Any]:
            return {
                "rope_type": "yarn",
                "factor": real(t.value(factor)),
                "original_max_position_embeddings": whole(t.value("--original-max-position-embeddings", 4096)),
                "beta_fast": real(t.value("--beta-fast", 32)),
                "beta_slow": real(t.value("--beta-slow", 1)),
                "mscale": real(t.value(mscale, 1.0)),
                "mscale_all_dim": real(t.value(everywhere, 0.0)),
            }

        more = ("--rope-type", "--original-max-position-embeddings", "--beta-fast", "--beta-slow")
        t.set("model.rope_scaling", yarn, factor, mscale, everywhere, *more)
    else:
        says = "has no effect without a --rotary-scaling-factor"
        t.apply({name: BuiltIn(says) for name in (factor, mscale, everywhere, "--rope-type")})


def clamped_sizes(t: Translation, family: str, missing: list[str]) -> None:
    """gpt-oss: a limit of the MLP's inputs, and a window in every second layer."""
    if family != "gpt_oss":
        return
    limit, every, offset = "--activation-func-clamp-value", "--window-attn-skip-freq", "--glu-linear-offset"
    if t.has(limit):
        t.set("model.swiglu_limit", lambda: real(t.value(limit)), limit)
    second: dict[Any, Rule] = {"2": BuiltIn("every second layer has the window")}
    one: dict[Any, Rule] = {"1.0": BuiltIn("of the clamped GLU"), "1": BuiltIn("of the clamped GLU")}
    t.apply(
        {every: ByValue(second, Missing("every second layer has the window")), offset: ByValue(one, Missing(LACKING))}
    )
    t.apply({"--enable-gpt-oss": BuiltIn("the family")})


# ---- models of other scripts ---------------------------------------------------------------------


def pair_of_stacks(t: Translation, family: str) -> None:
    """BERT and T5: the families of the papers, from which Megatron-LM's models differ in the same few traits."""
    t.set("model.family", family, "--bert-no-binary-head" if family == "bert" else "--decoder-num-layers")
    layers = t.first("--encoder-num-layers", "--num-layers")
    required(t, "model.num_hidden_layers", layers)
    for key, name in {"hidden_size": "--hidden-size", "num_attention_heads": "--num-attention-heads"}.items():
        required(t, f"model.{key}", name)
    t.set("model.intermediate_size", lambda: inner_width(t), t.first("--ffn-hidden-size", "--hidden-size"))
    required(t, "model.max_position_embeddings", t.first("--max-position-embeddings", "--seq-length"))
    vocabulary(t)
    if family == "bert":
        bert(t)
    else:
        t5(t)
    t.apply(MODEL_RULES)


def bert(t: Translation) -> None:
    t.differ("norms before each sub-layer, and one at the end", "bert has them after each sub-layer, as in the paper")
    t.set("model.layer_norm_eps", lambda: real(t.value("--norm-epsilon", 1e-5)), "--norm-epsilon")
    t.set("model.initializer_range", lambda: real(t.value("--init-method-std", 0.02)), "--init-method-std")
    t.set("model.hidden_act", "gelu_new" if not t.has("--no-bias-gelu-fusion") else "gelu", "--no-bias-gelu-fusion")
    for name, ours in DROPOUT.items():
        t.set(f"model.{ours}", lambda name=name: real(t.value(name, 0.1)), name)  # type: ignore[misc]
    t.set("task.name", "mlm", origin="the model")
    t.set("task.rate", lambda: real(t.value("--mask-prob", 0.15)), "--mask-prob")
    binary = "--bert-no-binary-head"
    t.set("model.head", "masked" if t.has(binary) else "pretraining", binary)
    t.set("task.pairs", None if t.has(binary) else "next", binary)
    if not t.has(binary):
        t.set("data.document_attention", True, origin="pairs of texts do not read each other")
    t.apply(ENCODER_RULES)


def t5(t: Translation) -> None:
    t.differ("LayerNorm, learned positions, biases and GELU in T5", "t5 has RMSNorm, relative positions and no biases")
    decoder = "--decoder-num-layers"
    if t.has(decoder):
        t.set("model.num_decoder_layers", lambda: whole(t.value(decoder)), decoder)
    t.set("model.head_dim", lambda: whole(t.value("--kv-channels", 64)), "--kv-channels")
    t.set("model.feed_forward_proj", "relu", origin="the nearest MLP without a gate")
    t.set("model.tie_word_embeddings", not t.has(UNTIED), UNTIED)
    t.set("model.dropout_rate", lambda: real(t.value("--hidden-dropout", 0.1)), "--hidden-dropout")
    t.apply({"--attention-dropout": BuiltIn("dropout_rate holds for attention too")})
    t.set("task.name", "span", origin="the model")
    t.set("data.packing", "online", origin="the task makes two texts of each document")
    t.set("task.noise", lambda: real(t.value("--mask-prob", 0.15)), "--mask-prob")
    t.set("task.mean_length", 3.0, origin=f"default of {TITLE}")
    length = t.first("--encoder-seq-length", "--seq-length")
    required(t, "task.encoder_length", length)
    t.apply({**ENCODER_RULES, "--init-method-std": Missing("t5 draws each matrix by its own rule, as in the paper")})
    t.apply({"--norm-epsilon": Missing("t5 has RMSNorm"), "--vocab-extra-ids": BuiltIn(SENTINELS)})


UNTIED = "--untie-embeddings-and-output-weights"
SENTINELS = "the sentinels are the tokenizer's: <extra_id_0>, <extra_id_1>, ..."
ENCODER_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "--position-embedding-type": Missing("the family says how positions are known"),
        "--normalization": Missing("the family has its own norms"),
        "--swiglu": Missing("the family has its own MLP"),
        UNTIED: Missing("the input embedding is the output matrix, as in the paper"),
        "--kv-channels": BuiltIn("hidden_size / num_attention_heads"),
        "--disable-bias-linear": Missing("the family has its own biases"),
        "--no-bias-gelu-fusion": BuiltIn("the same activation"),
        "--mask-prob": BuiltIn("the share of hidden tokens"),
        "--masked-softmax-fusion": BuiltIn("kernels are chosen by train.kernels"),
    }
)
LACKING = "no family that this model would have here does this"
MODEL_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "--apply-layernorm-1p": BuiltIn("only how the weight is stored: norms have no weight decay either way"),
        "--apply-residual-connection-post-layernorm": Missing(LACKING),
        "--no-rope-freq": Missing("layers without rotary embedding: family smollm3"),
        "--rotary-interleaved": Missing(LACKING),
        "--rotary-seq-len-interpolation-factor": Missing("model.rope_scaling={rope_type: linear, factor: N}"),
        "--window-attn-skip-freq": Missing("model.layer_types says which layers have the window"),
        "--moe-input-jitter-eps": Missing(),
        "--glu-linear-offset": Missing(LACKING),
        "--activation-func-clamp-value": Missing(LACKING),
        "--fp32-residual-connection": Missing("the residual stream has train.precision"),
        "--embedding-init-method-std": Missing("all matrices of a family are drawn with initializer_range"),
        "--num-query-groups": BuiltIn("has no effect without --group-query-attention"),
        "--rotary-percent": BuiltIn("has no effect without rotary positions"),
        "--make-vocab-size-divisible-by": BuiltIn("any size of the vocabulary works at any tp"),
        "--no-bias-gelu-fusion": BuiltIn("the same activation"),
        "--rope-type": BuiltIn("the rotary embedding of --position-embedding-type"),
        "--position-embedding-type": BuiltIn("the family's positions"),
        **{name: BuiltIn("has no effect without --num-experts") for name in EXPERT_KEYS},
        **{name: BuiltIn("has no effect without --multi-latent-attention") for name in LATENT},
    }
)
