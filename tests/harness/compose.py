"""Random runs with three to eight features at once, compared with one process; what fails is made smaller, feature
by feature.

    python -m tests.harness.compose 1000 2000 --minutes 4

tries the seeds 1000 to 1999 and prints what failed, with the fewest of its features that still fail.
tests/verifying/test_compose.py runs some.
"""

from __future__ import annotations

import os
import random
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from phalanx.base.errors import ConfigError
from phalanx.ops.quantized.recipes import find_recipe
from tests.harness.pool import RankPool
from tests.harness.support import broken, close_pool, confirm, mended, pool
from tests.harness.support_features import (
    DENSE,
    EXPERTS,
    FAMILIES,
    FEATURES,
    KEYS,
    ROTARY,
    Feature,
    Trial,
    exclude,
    made_again,
    model,
    ranks,
    sharded,
    trial,
    with_budget,
)

HEADS = (*DENSE, "mixtral", "qwen3_moe", "gpt_oss")


def with_quantizer(name: str, kind: str = "", **fp8: Any) -> Feature:
    return Feature(name, "Precision", kind, fp8=fp8, unit=16)


MORE = (
    model("5 layers", kind="layers", num_hidden_layers=5),
    model("3 layers", kind="layers", num_hidden_layers=3),
    model("2 key-value heads", HEADS, "kv", num_key_value_heads=2),
    model("heads of 10 features", HEADS, "odd", head_dim=10),
    model("uneven widths", FAMILIES, "odd", vocab_size=67, intermediate_size=21),
    model("heads of 12 features", HEADS, "odd", head_dim=12),
    model("widths of 3 blocks", FAMILIES, "odd", vocab_size=67, intermediate_size=192, moe_intermediate_size=192),
    model("each token to 3 experts", EXPERTS, "experts", num_experts_per_tok=3, topk_group=2),
    model("two further tokens", ("deepseek_v3",), num_nextn_predict_layers=2),
    ranks("tp=4", "", tp=4),
    ranks("pp=3", "", micro=2, pp=3),
    ranks("pp=4", "", micro=3, pp=4),
    ranks("cp=3", "", cp=3),
    ranks("ep=4", "", EXPERTS, ep=4),
    ranks("room for experts", "", EXPERTS, expert_room=1.0),
    ranks("dp=2", "", dp=2),
    ranks("dp=4", "", dp=4),
    sharded("prefetch 3", "", 2, prefetch=3),
    Feature("5 micro-batches", "Data", micro=5),
    Feature("15 tokens", "Data", "length", train={"seq_length": 15}),
    Feature("12 tokens", "Data", "length", train={"seq_length": 12}),
    Feature("tight clipping", "Optimizer", "clipping", optim={"clip_grad": 0.01}),
    made_again("frozen norms", kind="freeze", freeze=["*norm*"]),
    made_again("frozen embedding", ROTARY, "freeze", freeze=["*embed_tokens*"]),
    made_again("recompute attention and MLP", recompute_ops=["attention", "mlp"]),
    made_again("offload 2", kind="", offload_layers=2),
    with_quantizer("the first step in 8 bits", "last", last_steps=9),  # of 10
    with_quantizer("two steps in 8 bits", "last", last_steps=8),
    with_quantizer("linears that lose fall back", max_lost=1e-3),
    with_quantizer("linears that differ fall back", min_cosine=0.999, shadow_interval=1),
    Feature("moments in FP8", "Optimizer", "moments", optim={"moments": "fp8"}, unit=32),
)
NARROW = {"fp32", "bf16", "fp16", "Triton kernels"}  # compared less closely: seldom taken
CUT = {
    "moments in FP8"
}  # of FEATURES: runs of 32 that ranks cut are near, not the same; MORE has it with rows that are whole runs


def draw(seed: int) -> tuple[Feature, ...]:
    """A family and three to eight features that one run can have, on few ranks (seldom on more than four)."""
    pick = random.Random(seed)
    chosen: list[Feature] = [pick.choice(FEATURES[: len(FAMILIES)])]
    count, most = 1 + pick.randint(3, 8), pick.choice([2, 4, 4, 4, 8])
    others = [*(f for f in FEATURES[len(FAMILIES) :] if f.name not in CUT), *MORE]
    for feature in pick.sample(others, len(others)):
        rare = feature.name in NARROW or feature.unit > 32 or (feature.budget and merged((*chosen, feature)).fp8)
        if (
            len(chosen) < count
            and together(chosen, feature)
            and not (rare and pick.random() < 0.9)
            and world_of(*chosen, feature) <= most
        ):
            chosen.append(feature)
    return tuple(chosen)


def together(chosen: Sequence[Feature], feature: Feature) -> bool:
    everyone = (*chosen, feature)
    if any(f.fp8.get(key, value) != value for f in chosen for key, value in feature.fp8.items()):
        return False  # two values of one setting
    one = merged(everyone)
    if one.train.get("offload_layers", 0) > 1 and any(f.budget for f in everyone):
        return False  # with all layers on the host half-way may be less than what a choice needs
    if one.fp8 and (one.unit > 32 or one.families == ("deepseek_v3",)) and any(f.budget for f in everyone):
        return False  # measuring each way to recompute takes minutes
    if one.optim.get("moments") == "fp8" and (one.layout.get("tp", 1) > 2 or any(f.kind == "odd" for f in everyone)):
        return False  # ranks cut runs of 32
    if one.optim.get("moments") == "fp8" and one.families == ("t5",) and one.layout.get("cp", 1) > 1:
        return False  # scores are not scaled: of gradients over 20 orders, other sums round a few otherwise
    if one.optim.get("moments") == "fp8" and any(f.also == "resume" for f in everyone):
        # by a third step too many elements are rounded otherwise (`other_numbers`); tests/nn/test_fp8.py resumes
        return False
    if one.unit > 32 and one.layout.get("tp", 1) > 2:
        return False  # sequences of thousands of tokens
    if one.train.get("precision") == "fp16" and one.model.get("intermediate_size", 0) > 128:
        return False  # gradients overflow at the first loss scale, on one process too: that step is skipped
    return all(exclude(feature, f) is None for f in chosen)


def merged(features: Sequence[Feature]) -> Feature:
    """All as one feature, whose budget is left to `composed`."""
    one = reduce(both, features)
    return replace(
        one,
        budget=False,
        near=one.near or other_codes(one) or (any(f.kind in ("odd", "kv") for f in features) and cut_blocks(one)),
    )


def other_codes(one: Feature) -> bool:
    """Whether scales are not those of one process: experts' rows share them with others where ranks with other
    tokens have the same experts, too; of a key-value head that several ranks have, each casts its part of the
    gradient."""
    shared = set(one.families) <= set(KEYS) and one.layout.get("tp", 1) > one.model.get("num_key_value_heads", 2)
    experts = set(one.families) <= set(EXPERTS) and any(
        one.layout.get(axis, 1) > 1 for axis in ("tp", "cp", "ep", "etp")
    )
    return bool(one.fp8) and (shared or experts)


def cut_blocks(one: Feature) -> bool:
    """Whether ranks of odd widths, or of few key-value heads, cut blocks of scales otherwise than one process."""
    recipe = find_recipe(one.fp8.get("recipe", "tensorwise"))
    return bool(one.fp8) and max(*recipe.tokens, *recipe.weight) > 1 and one.layout.get("tp", 1) > 1


def both(a: Feature, b: Feature) -> Feature:
    sections = {
        name: {**getattr(a, name), **getattr(b, name)} for name in ("model", "layout", "train", "optim", "fp8", "reads")
    }
    most = {name: max(getattr(a, name), getattr(b, name)) for name in ("least", "dp", "data", "micro", "unit")}
    families = tuple(f for f in a.families if f in b.families)
    return Feature(
        f"{a.name}, {b.name}",
        "",
        families=families,
        **sections,
        **most,
        documents=b.documents or a.documents,
        also=a.also or b.also,
        near=a.near or b.near,
    )


def world_of(*features: Feature) -> int:
    one = merged(features)
    return trial(one, one).world


def composed(features: Sequence[Feature]) -> Trial:
    """A run with all features, with the first values that the rules offer where they refuse it; ConfigError where
    they offer none."""
    one = merged(features)
    t = trial(one, one)
    t = mended(t, broken(t))[1]
    if any(f.budget for f in features):
        t = replace(
            t, run=with_budget(replace(t.run, train=replace(t.run.train, recompute="none", recompute_ops=[])), t.world)
        )
        t = mended(t, broken(t))[1]
    return t


def trouble(ranks: RankPool, features: Sequence[Feature]) -> str:
    """What went wrong, or nothing. A run that the rules refuse whatever values they offer has no trouble."""
    try:
        t = composed(features)
    except ConfigError:
        return ""
    except Exception:  # a plan that cannot be made
        return traceback.format_exc(limit=-8)
    text = ""
    for each in (t, *other_numbers(t)):
        try:
            confirm(ranks, each)
            return ""
        except Exception:
            text = traceback.format_exc(limit=-8)
    return text


def other_numbers(t: Trial) -> list[Trial]:
    """With moments in FP8 the last bit of a gradient decides how a number is rounded (ops/optimizer/moments.py), so
    now and then an element of a run differs: what is wrong fails with other averages too."""
    return (
        [replace(t, run=replace(t.run, optim=replace(t.run.optim, beta1=0.8)))] if t.run.optim.moments == "fp8" else []
    )


def smaller(features: Sequence[Feature], fails: Callable[[Sequence[Feature]], Any]) -> tuple[Feature, ...]:
    """The features, the first of them a family, without those that are not needed to fail."""
    left = list(features)
    for feature in features[1:]:
        fewer = [f for f in left if f is not feature]
        if fails(fewer):
            left = fewer
    return tuple(left)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--slow", type=float, default=20.0, help="tell runs that take more seconds")
    options = parser.parse_args()
    start, counts = time.monotonic(), Counter[Any]()
    for seed in range(options.first, options.stop):
        if time.monotonic() - start > 60 * options.minutes:
            print("stopped before", seed)
            break
        features, began = draw(seed), time.monotonic()
        text = trouble(pool(), features)
        counts["failed" if text else "passed"] += 1
        if time.monotonic() - began > options.slow:
            print("slow", seed, round(time.monotonic() - began), [f.name for f in features], flush=True)
        if text:
            close_pool()
            print(
                "=====",
                seed,
                [f.name for f in features],
                "\n".join(text.strip().splitlines()[-25:])[-2500:],
                sep="\n",
                flush=True,
            )
            if time.monotonic() - start < 60 * options.minutes:
                print("FEWEST", [f.name for f in smaller(features, lambda fewer: trouble(pool(), fewer))], flush=True)
    print(dict(counts))
    close_pool()


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is first imported
    main()
