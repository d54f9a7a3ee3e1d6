"""Rules of the `layout` section: sizes against the world size and the number of blocks."""

from __future__ import annotations

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, no_effect, problem, within
from phalanx.layout.config import LayoutConfig


def check(
    config: LayoutConfig,
    *,
    world_size: int,
    blocks: int,
    beside_layers: int = 2,
    experts: int = 0,
    expert_size: int = 0,
    kv_heads: int = 1,
    attention_dropout: float = 0.0,
) -> list[Problem]:
    """blocks: transformer layers and `beside_layers` others (embedding, head, multi-token prediction).

    experts: in each layer, 0 for a dense model; expert_size: their width. kv_heads: in each layer; attention_dropout:
    of its probabilities.
    """
    sizes = ("tp", "cp", "cp_ulysses", "ep", "etp", "pp", "virtual_stages", "media_group", "bucket_mb")
    found = at_least("layout", config, 1, *sizes)
    found += at_least("layout", config, 0, "prefetch")
    if not found:
        found += (
            check_world(config, world_size)
            + check_virtual_stages(config)
            + check_stages(config, blocks, f"blocks (layers + {beside_layers})")
        )
        found += check_experts(config, world_size, experts, expert_size) + check_context(
            config, kv_heads, attention_dropout
        )
        found += check_sharding(config, world_size, experts) + check_media_group(config, world_size)
    return found


def check_media_group(config: LayoutConfig, world_size: int) -> list[Problem]:
    """Groups of data-parallel ranks that compute each other's images are equally large."""
    together, group = config.pp * config.cp * config.tp, config.media_group
    if group is None or world_size % together or world_size // together % group == 0:
        return []
    because = {"data-parallel ranks": world_size // together}
    rule = "must divide the number of data-parallel ranks (world_size / (pp * cp * tp))"
    return [problem("layout", config, "media_group", rule, because, divisors(group, world_size // together))]


def check_sharding(config: LayoutConfig, world_size: int, experts: int) -> list[Problem]:
    """Groups of ranks that shard must divide the data-parallel ranks evenly, also those of experts; and nothing is set
    that the ZeRO stage does not read."""
    level = {"layout.sharding": config.sharding}
    found = no_effect("layout", config, ("prefetch",), "sharding >= 2", level) if config.sharding < 2 else []
    found += no_effect("layout", config, ("reshard_after_forward",), "sharding=3", level) if config.sharding < 3 else []
    if config.sharding == 0:
        return found + no_effect(
            "layout", config, ("shard_group", "shard_across", "dp_overlap"), "sharding >= 1", level
        )
    if config.shard_group is None:
        return found + no_effect("layout", config, ("shard_across",), "shard_group", {"layout.shard_group": None})
    return found + check_group(config, world_size // (config.pp * config.tp), experts)


def check_group(config: LayoutConfig, ranks: int, experts: int) -> list[Problem]:
    group = config.shard_group or 0
    if group < 2:
        return [
            problem(
                "layout", config, "shard_group", "must be an integer >= 2 (1 would be layout.sharding=0)", {}, (2, None)
            )
        ]
    if ranks % group:
        valid = tuple(d for d in divisors(group, ranks) if d > 1)
        return [
            problem(
                "layout",
                config,
                "shard_group",
                "must divide the number of data-parallel ranks",
                {"data-parallel ranks": ranks},
                valid,
            )
        ]
    if not experts:
        return []
    dense, each = group * config.tp, config.ep * config.etp
    if dense % each == 0 or each % dense == 0:
        return []
    valid = tuple(
        d for d in divisors(group, ranks) if d > 1 and (d * config.tp % each == 0 or each % (d * config.tp) == 0)
    )
    because = {"shard_group * tp": dense, "ep * etp": each}
    return [
        problem(
            "layout",
            config,
            "shard_group",
            "shard_group * tp and ep * etp must be such that one divides the other",
            because,
            valid,
        )
    ]


def check_experts(config: LayoutConfig, world_size: int, experts: int, expert_size: int) -> list[Problem]:
    """Every expert rank has the same number of experts; ep and etp divide the ranks of a stage."""
    if not experts:
        return no_effect(
            "layout", config, ("ep", "etp", "dispatch", "ep_overlap", "expert_room"), "experts", {"experts of model": 0}
        )
    found, stage = within("layout", config, "expert_room", "[1, inf]"), world_size // config.pp
    if config.dispatch == "alltoall" and not found:
        found += no_effect(
            "layout", config, ("expert_room",), "dispatch=allgather or push", {"layout.dispatch": config.dispatch}
        )
    if config.dispatch in ("alltoall", "push"):
        found += no_effect(
            "layout", config, ("ep_overlap",), "dispatch=allgather", {"layout.dispatch": config.dispatch}
        )
    if experts % config.ep:
        because = {"experts per layer": experts}
        found.append(
            problem(
                "layout",
                config,
                "ep",
                "must divide the number of experts",
                because,
                divisors(config.ep, experts, stage),
            )
        )
    if config.etp > expert_size:
        because = {"width of an expert": expert_size}
        found.append(
            problem("layout", config, "etp", "must be <= the width of an expert", because, divisors(config.etp, stage))
        )
    if stage % (config.ep * config.etp):
        because = {"layout.etp": config.etp, "ep * etp": config.ep * config.etp, "ranks of a stage": stage}
        rule = "ep * etp must divide the number of ranks of a stage (world_size / pp)"
        found.append(
            problem("layout", config, "ep", rule, because, divisors(config.ep, max(1, stage // config.etp), experts))
        )
    return found


def check_context(config: LayoutConfig, kv_heads: int, attention_dropout: float) -> list[Problem]:
    """There are heads to exchange, and attention to one shard of the keys at a time has no dropout."""
    if config.cp == 1:
        return no_effect("layout", config, ("cp_attention", "cp_ulysses", "cp_degree"), "cp > 1", {"layout.cp": 1})
    inner, each = config.cp_ulysses, max(1, kv_heads // config.tp)
    found: list[Problem] = []
    if config.cp % inner:
        found.append(
            problem(
                "layout", config, "cp_ulysses", "must divide cp", {"layout.cp": config.cp}, divisors(inner, config.cp)
            )
        )
    if each % inner:
        because = {"key-value heads of model": kv_heads, "layout.tp": config.tp}
        rule = "must divide the number of key-value heads of a tensor-parallel rank"
        found.append(problem("layout", config, "cp_ulysses", rule, because, divisors(inner, config.cp, each)))
    if inner == config.cp:
        found += no_effect(
            "layout", config, ("cp_attention",), "cp_ulysses < cp", {"layout.cp_ulysses": inner, "layout.cp": config.cp}
        )
    elif config.cp_attention == "ring" and attention_dropout:
        dropout = {"model.attention_dropout": attention_dropout}
        rule = "attention to one part of the keys at a time is fused and has no dropout of probabilities"
        found.append(problem("layout", config, "cp_attention", rule, dropout, ("auto", "allgather")))
    return found


def check_world(config: LayoutConfig, world_size: int) -> list[Problem]:
    alone = [
        problem(
            "layout",
            config,
            name,
            "must divide world_size",
            {"world_size": world_size},
            divisors(getattr(config, name), world_size),
        )
        for name in ("tp", "cp", "pp")
        if world_size % getattr(config, name)
    ]
    together = config.tp * config.cp * config.pp
    if alone or world_size % together == 0:
        return alone
    if config.cp == 1:
        because = {"tp * pp": together, "layout.tp": config.tp, "world_size": world_size}
        return [
            problem(
                "layout",
                config,
                "pp",
                "tp * pp must divide world_size",
                because,
                divisors(config.pp, world_size // config.tp),
            )
        ]
    because = {"tp * cp * pp": together, "layout.tp": config.tp, "layout.pp": config.pp, "world_size": world_size}
    return [
        problem("layout", config, "cp", "tp * cp * pp must divide world_size", because, divisors(config.cp, world_size))
    ]


def check_virtual_stages(config: LayoutConfig) -> list[Problem]:
    if config.virtual_stages == 1 or config.pp > 1:
        return []
    return [problem("layout", config, "virtual_stages", "needs pp >= 2", {"layout.pp": 1}, (1,))]


def check_stages(config: LayoutConfig, blocks: int, name_of_blocks: str) -> list[Problem]:
    count = config.pp * config.virtual_stages
    if count > blocks:
        name, other = ("virtual_stages", "pp") if config.virtual_stages > 1 else ("pp", "virtual_stages")
        because = {f"layout.{other}": getattr(config, other), name_of_blocks: blocks}
        return [problem("layout", config, name, "leaves stages without a block", because)]
    if config.stages is None:
        return []
    even = tuple(blocks * (i + 1) // count - blocks * i // count for i in range(count))
    found = []
    if len(config.stages) != count:
        because = {"numbers": len(config.stages), "pp * virtual_stages": count}
        found.append(problem("layout", config, "stages", "must have pp * virtual_stages numbers", because, (even,)))
    if any(n < 1 for n in config.stages):
        found.append(problem("layout", config, "stages", "must give each stage at least 1 block", {}, (even,)))
    if sum(config.stages) != blocks:
        because = {"sum": sum(config.stages), name_of_blocks: blocks}
        found.append(problem("layout", config, "stages", "must sum to the number of blocks", because, (even,)))
    return found
