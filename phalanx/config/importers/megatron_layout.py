"""Megatron-LM's precision, parallelism, ZeRO and pipeline stages, and recomputation, and what becomes of each here."""

from __future__ import annotations

from typing import Any

from phalanx.config.importers.megatron_steps import CP, PP, TP
from phalanx.config.importers.translation import (
    Becomes,
    BuiltIn,
    ByHand,
    ByValue,
    Missing,
    Refused,
    Rule,
    Translation,
    mebibytes,
    one_of,
    real,
    whole,
)

SCALE = {
    "--initial-loss-scale": ("train.loss_scale", 2.0**32, real),
    "--min-loss-scale": ("train.loss_scale_min", 1.0, real),
    "--loss-scale-window": ("train.loss_scale_window", 1000, whole),
    "--hysteresis": ("train.loss_scale_hysteresis", 2, whole),
}
SCALING = {"tensorwise": "tensorwise", "delayed": "delayed", "mxfp8": "mxfp8", "blockwise": "blockwise"}
FP8 = (
    "--fp8-amax-compute-algo",
    "--fp8-param-gather",
    "--fp8-margin",
    "--fp8-interval",
    "--first-last-layers-bf16",
    "--num-layers-at-start-in-bf16",
    "--num-layers-at-end-in-bf16",
)


def precision(t: Translation, ranks: int | None) -> None:
    half = t.first("--bf16", "--fp16")
    t.set("train.precision", half.strip("-") if t.has(half) else "fp32", "--bf16", "--fp16")
    if half == "--fp16" and t.has(half):
        for name, (ours, default, convert) in SCALE.items():
            t.set(ours, lambda n=name, d=default, c=convert: c(t.value(n, d)), name)  # type: ignore[misc]
    t.apply({name: BuiltIn("has no effect without --fp16") for name in SCALE})
    skipping = "--no-check-for-nan-in-loss-and-grad"
    if t.has(skipping):
        t.built_in(skipping, "a step that is not finite is never applied; train.guard.policy says what happens")
    elif not t.has("--fp16"):
        t.set("train.guard.policy", "stop", skipping)
    fp8(t)


def fp8(t: Translation) -> None:
    form, recipe, history = "--fp8-format", "--fp8-recipe", "--fp8-amax-history-len"
    if t.has("--fp4-format"):
        t.set("train.fp8.recipe", "nvfp4", "--fp4-format", "--fp4-recipe")
        t.apply({name: BuiltIn("--fp4-format counts") for name in (form, recipe, history)})
        return
    if not t.has(form):
        t.apply({name: BuiltIn("has no effect without --fp8-format") for name in (recipe, history, *FP8)})
        return
    kind = str(t.value(recipe, "delayed"))
    t.set("train.fp8.recipe", lambda: one_of(SCALING)(kind), recipe, form)
    if kind == "delayed":
        most = "--fp8-amax-compute-algo"

        def length() -> int:  # most_recent reads only the last of the history
            return whole(t.value(history, 1)) if t.value(most, "most_recent") == "max" else 1

        t.set("train.fp8.history", length, history, most)
    first, last = "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"
    if t.has("--first-last-layers-bf16"):

        def ends() -> int:
            both = whole(t.value(first, 1)), whole(t.value(last, 1))
            if both[0] != both[1]:
                raise Refused("train.fp8.end_layers is the same number at both ends")
            return both[0]

        t.set("train.fp8.end_layers", ends, "--first-last-layers-bf16", first, last)


EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
ZERO = "--zero-stage"
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def layout(t: Translation, ranks: int | None) -> None:
    tp = t.first(*TP)
    t.set("layout.tp", lambda: whole(t.value(tp, 1)), tp)
    t.set("layout.pp", lambda: whole(t.value(PP[0], 1)), PP[0])
    t.set("layout.cp", lambda: whole(t.value(CP[0], 1)), CP[0])
    experts = t.setting("model.num_experts_per_tok") is not None and t.has("--num-experts")
    if experts:
        t.set("layout.ep", lambda: whole(t.value(EP, 1)), EP)
        t.set("layout.etp", lambda: whole(t.value(ETP, t.value(tp, 1))), ETP, tp)
        kind = "--moe-token-dispatcher-type"
        dispatchers = {"allgather": "allgather", "alltoall": "alltoall", "alltoall_seq": "alltoall", "flex": "auto"}
        t.set("layout.dispatch", lambda: one_of(dispatchers)(t.value(kind, "allgather")), kind)
    says = "has no effect without --num-experts" if not t.has("--num-experts") else "the model has no experts here"
    t.apply({name: BuiltIn(says) for name in (EP, ETP, "--moe-token-dispatcher-type")})
    sharding(t, ranks)
    stages(t)
    ring = "--cp-comm-type"
    kinds: dict[Any, Rule] = {
        "p2p": Becomes("layout.cp_attention", lambda _: "ring"),
        "all_gather": Becomes("layout.cp_attention", lambda _: "allgather"),
        "a2a": Becomes("layout.cp_ulysses", lambda _: whole(t.value(CP[0], 1))),
    }
    with_cp = t.setting("layout.cp") not in (None, 1)
    t.apply(
        {ring: ByValue(kinds, Missing("layout.cp_ulysses")) if with_cp else BuiltIn("has no effect without cp > 1")}
    )
    bucket = "--ddp-bucket-size"
    t.apply({bucket: Becomes("layout.bucket_mb", lambda value: mebibytes(value, 4))})


def sharding(t: Translation, ranks: int | None) -> None:
    """ZeRO stages: the distributed optimizer is stage 1; Megatron-FSDP says its own."""
    plain, own, torch_own = "--use-distributed-optimizer", "--data-parallel-sharding-strategy", "--use-torch-fsdp2"
    fsdp = t.first("--use-megatron-fsdp", "--use-custom-fsdp")
    if t.has(ZERO):  # of Megatron-DeepSpeed
        t.set("layout.sharding", lambda: whole(t.value(ZERO)), ZERO)
    elif t.has(torch_own):
        t.set("layout.sharding", 3, torch_own, plain)
    elif t.has(fsdp):
        t.set("layout.sharding", lambda: one_of(STRATEGIES)(t.value(own, "no_shard")), fsdp, own, plain)
    else:
        t.set("layout.sharding", 1 if t.has(plain) else 0, plain)
        t.apply({own: BuiltIn("has no effect without --use-megatron-fsdp")})
    keep = "--torch-fsdp2-no-reshard-after-forward"
    if t.has(keep):
        t.set("layout.reshard_after_forward", False, keep)
    groups = "--num-distributed-optimizer-instances"
    if t.value(groups) in ("1", 1):
        t.built_in(groups, "all ranks shard together")
    elif t.has(groups) and ranks is not None:

        def group() -> int:
            sizes = [whole(t.value(t.first(*names), 1)) for names in (TP, PP)]
            return ranks // (sizes[0] * sizes[1] * whole(t.value(groups)))

        t.set("layout.shard_group", group, groups)
    elif t.has(groups):
        t.by_hand("layout.shard_group", f"data-parallel ranks / {t.value(groups)}; --ranks computes it", groups)


def stages(t: Translation) -> None:
    """Layers of stages: virtual ones by number or by layers; and stages at the ends with fewer."""
    each, chunks = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    layers = t.first("--num-layers", "--encoder-num-layers")
    if t.has(chunks):
        t.set("layout.virtual_stages", lambda: whole(t.value(chunks)), chunks)
    elif t.has(each):

        def virtual() -> int:
            per_rank, rest = divmod(whole(t.value(layers, 0)), whole(t.value(PP[0], 1)))
            if rest or per_rank % whole(t.value(each)):
                raise Refused("layers / pp must be a multiple of it")
            return per_rank // whole(t.value(each))

        t.set("layout.virtual_stages", virtual, each, layers, *PP)
    first, last = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
    if (t.has(first) or t.has(last)) and not t.has(chunks) and not t.has(each):

        def uneven() -> list[int]:
            return uneven_stages(t, layers, first, last)

        t.set("layout.stages", uneven, first, last, layers, *PP)
    t.apply(
        {"--pipeline-model-parallel-layout": ByHand("layout.stages", "blocks of each stage; unset: divided by cost")}
    )


def uneven_stages(t: Translation, layers: str, first: str, last: str) -> list[int]:
    """Blocks of each stage: the embedding is the first one's, the head (and multi-token prediction) the last one's."""
    pp, total = whole(t.value(PP[0], 1)), whole(t.value(layers, 0))
    ends = {0: t.value(first), pp - 1: t.value(last)}
    fixed = {at: whole(value) for at, value in ends.items() if value is not None}
    others = pp - len(fixed)
    left = total - sum(fixed.values())
    if pp < 2 or left < 0 or (others and left % others) or (not others and left):
        raise Refused("the other layers must be a multiple of the other stages")
    counts = [fixed.get(at, left // max(1, others)) for at in range(pp)]
    more = 1 if t.setting("model.num_nextn_predict_layers") else 0
    return [counts[0] + 1, *counts[1:-1], counts[-1] + 1 + more]


MODULES = {
    "core_attn": "attention",
    "layernorm": "norm",
    "mlp": "mlp",
    "moe": "experts",
    "moe_act": "activation",
    "mla_up_proj": "qkv",
    "shared_experts": "mlp",
}
RECOMPUTE = ("--recompute-method", "--recompute-num-layers", "--recompute-modules", "--moe-layer-recompute")


def memory(t: Translation, ranks: int | None) -> None:
    """Recomputation: selective is attention's inside there too, or the modules that are named."""
    short, kind, named = "--recompute-activations", "--recompute-granularity", "--recompute-modules"
    old = "--checkpoint-activations"
    if t.value(kind) == "full" or t.has(old):
        t.set("train.recompute", "full", kind if t.has(kind) else old)
        t.apply({short: BuiltIn(f"{kind} counts"), named: BuiltIn("whole layers are recomputed")})
        how, count = "--recompute-method", "--recompute-num-layers"
        whole_layers = {"uniform": BuiltIn("all layers are recomputed")}
        t.apply(
            {how: ByValue(whole_layers, Missing("all layers are recomputed; a budget: train.recompute_budget_gib"))}
        )
        one: dict[Any, Rule] = {"1": BuiltIn("one layer at a time")}
        t.apply({count: ByValue(one, Missing("one layer at a time; a budget: train.recompute_budget_gib"))})
    elif t.has(short) or t.has(kind):
        given = t.value(named, "core_attn")
        modules = [given] if isinstance(given, str) else list(given)
        ops = list(dict.fromkeys(MODULES[m] for m in modules if m in MODULES and m != "core_attn"))
        preset = "selective" if "core_attn" in modules else "none"
        t.set("train.recompute", preset, kind, short, named)
        if ops:
            t.set("train.recompute_ops", ops, named)
    experts = "--moe-layer-recompute"
    if t.has(experts) and t.setting("train.recompute") != "full" and t.setting("train.recompute_ops") is None:
        t.set("train.recompute_ops", ["experts"], experts)
    t.apply({name: BuiltIn("has no effect without recomputation") for name in RECOMPUTE})
