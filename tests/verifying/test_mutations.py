"""Every collective matters: dropping any one call site, on all ranks, must make the comparison with one process fail.

The sites are traced, not listed: a new collective is tested as soon as it is written.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from phalanx.comm.debug import Site
from phalanx.nn.adapters.dora import DoRA
from phalanx.nn.adapters.lora import LoRA
from tests.harness.parity import compare, truth_of
from tests.harness.pool import RankPool, RanksFailed
from tests.harness.sample import covering, rest_in_soak
from tests.verifying.test_parity import build_run, case

STEPS = 2

LAYOUTS = {
    "llama tp2 pp2 dp2, sharded, small buckets": case("llama", 8, tp=2, pp=2, micro_batch=2),
    "gpt2 tp2 pp2 dp2, sharded, tied, recompute": case("gpt2", 8, tp=2, pp=2, recompute="full"),
    "llama dp2 tp2, level 0": case("llama", 4, tp=2, sharding=0),
    "llama tp4, 2 kv heads": case("llama", 4, tp=4, global_batch=2),
    "tied llama pp2 x 2 virtual stages": case("llama-tied", 2, pp=2, virtual_stages=2, global_batch=4),
    "llama tp4, overlapped": case("llama", 4, tp=4, tp_overlap="on", global_batch=2),
    "deepseek_v3 tp2, dp2, ep4": case("deepseek_v3", 4, tp=2, ep=4, global_batch=4),
    "deepseek_v3 with two further tokens, pp3": case("deepseek_v3-mtp", 3, pp=3, stages=(1, 3, 1), global_batch=4),
    "mixtral tp2, ep2 x etp2, capacity": case("mixtral-full", 4, tp=2, ep=2, etp=2, global_batch=4),
    "qwen3_moe tp2, ep2 of 4, all-gather": case(
        "qwen3_moe", 4, tp=2, ep=2, dispatch="allgather", ep_overlap="on", global_batch=4
    ),
    "deepseek_v3 ep2 x etp2 across dp, push": case("deepseek_v3", 4, ep=2, etp=2, dispatch="push", global_batch=4),
    "mixtral ep2, all-gather": case("mixtral", 2, ep=2, dispatch="allgather", global_batch=4),
    "gpt_oss tp2, ep2 x etp2": case("gpt_oss", 4, tp=2, ep=2, etp=2, global_batch=4),
    "llama cp2 tp2, ring": case("llama", 4, cp=2, tp=2, global_batch=2),
    "gpt_oss cp4, heads in pairs, all-gather": case(
        "gpt_oss", 4, cp=4, cp_ulysses=2, cp_attention="allgather", global_batch=2
    ),
    "llama cp4 by document": case("llama", 4, cp=4, cp_degree="dynamic", documents="packed"),
    "llama cp4 by document, heads in pairs": case(
        "llama-tied", 4, cp=4, cp_ulysses=4, cp_degree="dynamic", documents="packed"
    ),
    "gpt2 cp2, dropout": case("gpt2", 2, cp=2, global_batch=2),
    "olmo2 tp2, norms over all heads": case("olmo2", 2, tp=2, global_batch=2),
    "mixtral cp2, ep2, capacity": case("mixtral-full", 2, cp=2, ep=2, global_batch=2),
    "gpt2 tied pp2 dp2, level 2": case("gpt2", 4, pp=2, sharding=2, global_batch=4),
    "llama dp4 in pairs, level 3, optimizer over both": case(
        "llama", 4, sharding=3, shard_group=2, shard_across="optimizer", global_batch=8
    ),
    "llama dp4 in pairs, level 3, optimizer over both, by copies": case(
        "llama", 4, sharding=3, shard_group=2, shard_across="optimizer", global_batch=8, dp_overlap="on"
    ),
    "gpt2 dp2, level 1, by copies": case("gpt2", 2, global_batch=4, dp_overlap="on"),
    "llama dp4 in pairs, level 1": case("llama", 4, sharding=1, shard_group=2, global_batch=8),
    "mixtral ep2 of dp8 in fours, level 3": case("mixtral", 8, ep=2, sharding=3, shard_group=4, global_batch=8),
    "mixtral ep2 of dp8 in fours, level 2, optimizer over both": case(
        "mixtral", 8, ep=2, sharding=2, shard_group=4, shard_across="optimizer", global_batch=8
    ),
    "t5 tied tp2 pp3, packed": case("t5-tied", 6, tp=2, pp=3, documents="packed", global_batch=2),
    "t5 cp2, all-gather": case("t5", 2, cp=2, cp_attention="allgather", global_batch=2),
    "llava tp2 cp2, packed": case("llava", 4, tp=2, cp=2, documents="packed", global_batch=4, micro_batch=4),
    "llava tp2 dp2, each other's images": case("llava", 4, tp=2, global_batch=4, micro_batch=2),
    "qwen3_vl tp2 pp2": case("qwen3_vl", 4, tp=2, pp=2, global_batch=4, micro_batch=4),
    "gpt2 tp2, gpipe pp2": case("gpt2", 4, tp=2, pp=2, schedule="gpipe", global_batch=4),
    "mixtral tp2, ep2 x etp2, LoRA": case("mixtral", 4, tp=2, ep=2, etp=2, global_batch=2),
    "mixtral tp2, ep2 x etp2, DoRA": case("mixtral", 4, tp=2, ep=2, etp=2, global_batch=2),
    "qwen3 tp2, LoRA with dropout": case("qwen3", 2, tp=2, global_batch=2),
}
EVERYWHERE = ["*", "*embed_tokens*", "lm_head.weight"]
ADAPTERS = {
    "mixtral tp2, ep2 x etp2, LoRA": LoRA.Config(method="lora", rank=3, targets=EVERYWHERE),
    "mixtral tp2, ep2 x etp2, DoRA": DoRA.Config(method="dora", rank=3),
    "qwen3 tp2, LoRA with dropout": LoRA.Config(method="lora", rank=3, dropout=0.3),
}
OWN = dict(zip(ADAPTERS, ("adapted_matmul", "adapted_linear", "low_rank")))  # the file that has each one's exchanges


def sums_of_adapters(site: Site) -> bool:
    """Whether a site is in a file of adapters, looks ids up in or adds to one of their matrices, or sums the gradients
    of those that several ranks hold whole."""
    places = ("adapted_", "low_rank", "dense/embedding", "sum_together", "cross_entropy.py results")
    return any(place in f"{site.file} {site.function}" for place in places)


class Layout:
    """A layout, its truth, and the sites where its steps communicate (`build` opens connections before watching
    starts)."""

    def __init__(self, ranks: RankPool, name: str):
        self.ranks, self.name, self.world = ranks, name, LAYOUTS[name]["world"]
        self.run = replace(build_run(LAYOUTS[name]), lora=ADAPTERS.get(name))
        self.documents = LAYOUTS[name]["documents"]
        self.truth = truth_of(ranks, self.run, STEPS, self.documents)
        results = self.train(watch=True)
        compare(results, self.truth, STEPS)
        self.sites = sorted({Site(*site) for r in results for site in r["sites"]})

    def train(self, drop: Site | None = None, watch: bool = False) -> list[dict]:
        return self.ranks.run(
            "tests.harness.parity:run_layout", self.world, self.run, STEPS, self.documents, drop, watch, timeout=60.0
        )

    def survives(self, site: Site) -> bool:
        """Whether the comparison still passes without this site."""
        try:
            compare(self.train(drop=site), self.truth, STEPS)
        except (AssertionError, RanksFailed):
            return False
        return True


@lru_cache
def layout(ranks: RankPool, name: str) -> Layout:
    return Layout(ranks, name)


def options(model: str, layout: dict) -> set:
    """Its family, the options it sets, whether the ranks of tp send each expert's tokens, and whether those of cp
    exchange both heads and keys."""
    both = 1 < layout.get("cp_ulysses", 1) < layout.get("cp", 1) and "keys and heads"
    return {model, *layout, both, "ep" in layout and "tp" in layout and "dispatch" not in layout}


PLAIN = {name: c for name, c in LAYOUTS.items() if name not in ADAPTERS}
FEW = covering(
    {name: options(c["model"], c["layout"]) for name, c in PLAIN.items()},
    {name: c["world"] for name, c in PLAIN.items()},
)


def homes_of(ranks: RankPool, names: list[str]) -> dict[Site, list[str]]:
    """The sites of these layouts, each with those that have it."""
    homes: dict[Site, list[str]] = {}
    for name in names:
        for site in layout(ranks, name).sites:
            homes.setdefault(site, []).append(name)
    return homes


@pytest.mark.soak
def test_every_axis_has_sites(ranks):
    axes = {"cp heads of 2", "cp keys of 2"}
    axes |= {
        "tp",
        "tp part",
        "cp",
        "cp heads",
        "cp keys",
        "tp x cp",
        "tp x cp x dp",
        "dp x cp",
        "dp",
        "pp",
        "pp part",
        "world",
        "ep",
        "etp",
        "ep x etp",
        "edp",
    }
    axes |= {f"{axis} {part}" for axis in ("dp", "edp") for part in ("group", "groups", "gather")}
    edges = {f"edge {a}->{b}" for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))}
    assert {*axes, *edges} == {site.axis for site in homes_of(ranks, list(LAYOUTS))}


def test_each_site_matters(ranks):
    """Of a few layouts that have every family and option of all: sites that cover their axes, callers and
    operations, each once, in one of the smallest layouts that have it, picked by seed. All sites in every layout
    that has them: below."""
    pick, homes = random.Random(20261120), homes_of(ranks, FEW)
    assert {"tp", "pp", "dp", "ep", "edp", "cp keys", "cp heads", "edge 0->1", "edge 1->0"} <= {
        site.axis for site in homes
    }
    sites = {repr(site): site for site in homes}
    few = covering({name: (site.axis, (site.file, site.function), site.op) for name, site in sites.items()})
    survivors = [
        site
        for name, site in sites.items()
        if name in few and layout(ranks, pick.choice(smallest(homes[site]))).survives(site)
    ]
    assert not survivors, f"dropped without notice: {survivors}"


@pytest.mark.parametrize("name", rest_in_soak(ADAPTERS, list(ADAPTERS)[1:2]))
def test_each_sum_of_adapters_matters(ranks, name):
    """Linears of attention and of experts, rows and columns; with LoRA the embedding and the head too."""
    mine = [site for site in layout(ranks, name).sites if sums_of_adapters(site)]
    assert {"tp", *(["etp"] if "etp" in name else [])} <= {site.axis for site in mine}
    assert {OWN[name], "flat"} <= {Path(site.file).stem for site in mine}
    survivors = [site for site in mine if layout(ranks, name).survives(site)]
    assert not survivors, f"dropped without notice: {survivors}"


def smallest(names: list[str]) -> list[str]:
    least = min(LAYOUTS[name]["world"] for name in names)
    return [name for name in names if LAYOUTS[name]["world"] == least]


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_site_matters_in_each_layout(ranks, name, part):
    """In four parts, so that none takes minutes."""
    survivors = [site for site in layout(ranks, name).sites[part::4] if layout(ranks, name).survives(site)]
    assert not survivors, f"dropped without notice in {name}: {survivors}"
