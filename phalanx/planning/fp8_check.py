"""Rules of train.fp8: what the device supports, which sizes of linears a recipe can take, and keys that would
contradict each other."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import gcd
from typing import Any

from phalanx.base.errors import Problem
from phalanx.base.registry import BUILT_IN, NotFound
from phalanx.base.rules import at_least, multiples, no_effect, problem, within
from phalanx.config.run import Fp8Config, Run
from phalanx.ops.quantized.recipes import SEAM, find_recipe
from phalanx.planning.blocks import LinearFacts, cut_linears, whole_linears
from phalanx.planning.plan import fp8_linears

AT = "train.fp8"


def check_fp8(run: Run, capability: tuple[int, int] | None, device: str, sound: bool) -> list[Problem]:
    """`capability`: of the GPUs; None where recipes are emulated anyway. `sound`: neither the model nor the layout has
    a problem of its own."""
    c = run.train.fp8
    if c is None:
        return []
    try:
        recipe = find_recipe(c.recipe)
    except NotFound as error:
        return [error.problem(f"{AT}.recipe", c.recipe)]
    found = at_least(AT, c, 0, "end_layers", "last_steps") + at_least(AT, c, 1, "history", "shadow_interval")
    found += within(AT, c, "max_lost", "(0, 1)", (0.2,)) + within(AT, c, "min_cosine", "(0, 1)", (0.98,))
    if c.last_steps >= run.train.last_step:
        rule = "must leave steps for the recipe before them"
        found.append(
            problem(
                AT, c, "last_steps", rule, {"train.steps": run.train.last_step}, (0, max(0, run.train.last_step // 10))
            )
        )
    if not recipe.delayed:
        found += no_effect(AT, c, ("history",), "recipe=delayed", {f"{AT}.recipe": c.recipe})
    if c.shadow_interval is None:
        found += no_effect(AT, c, ("min_cosine",), "shadow_interval", {f"{AT}.shadow_interval": None})
    if recipe.emulated:
        found += no_effect(AT, c, ("accumulate",), "a recipe that has GEMMs of its own", {f"{AT}.recipe": c.recipe})
    if capability is not None and capability < recipe.capability:
        need = ".".join(map(str, recipe.capability))
        rule = f"needs an NVIDIA GPU of compute capability {need}, or a recipe that is emulated; or train.fp8=null"
        others = tuple(name for name in BUILT_IN[SEAM] if find_recipe(name).capability <= capability)
        found.append(problem(AT, c, "recipe", rule, {"device": f"{device}, {capability[0]}.{capability[1]}"}, others))
    return found + (check_linears(run) if sound and not found else [])


def check_moments(run: Run, capability: tuple[int, int] | None, device: str) -> list[Problem]:
    """FP8 moments need a GPU that can convert to FP8."""
    if capability is None or capability >= (8, 9):
        return []
    rule, because = (
        "fp8 needs an NVIDIA GPU of compute capability 8.9",
        {"device": f"{device}, {capability[0]}.{capability[1]}"},
    )
    configs = {"optim": run.optim, "optim.fallback": run.optim.fallback}
    return [
        problem(section, config, "moments", rule, because, ("bf16", "master"))
        for section, config in configs.items()
        if config is not None and config.moments == "fp8"
    ]


def check_linears(run: Run) -> list[Problem]:
    """Some linear uses the recipe, every glob matches something, and no scaling block is split by a size."""
    c, fp8 = run.train.fp8, fp8_linears(run)
    if c is None or fp8 is None:
        return []
    layers = run.model.num_hidden_layers
    if 2 * c.end_layers >= layers:
        because = {"model.num_hidden_layers": layers}
        return [problem(AT, c, "end_layers", "must leave layers between the ends", because, (0, (layers - 1) // 2))]
    names = [name for linear in whole_linears(run.model) for name in linear.matrices]
    idle = [g for g in c.exclude if not any(fnmatchcase(name, g) for name in names)]
    if idle:
        others = [g for g in c.exclude if g not in idle]
        return [problem(AT, c, "exclude", "must fit names of linears", {"fits none": ", ".join(idle)}, (others,))]
    linears = [x for x in cut_linears(run.model, run.layout.tp, run.layout.etp) if fp8.takes(x.matrices)]
    if not linears:
        return [problem(AT, c, "exclude", "must leave a linear", {"linears": 0}, ([],))]
    return check_sizes(run, c, linears)


def check_sizes(run: Run, c: Fp8Config, linears: Sequence[LinearFacts]) -> list[Problem]:
    t, tp, unit = run.train, run.layout.tp, find_recipe(c.recipe).unit
    found = []
    parts = tp * (2 * run.layout.cp if run.layout.cp > 1 else 1)  # with cp, each rank holds two chunks of a sequence
    if t.micro_batch * t.seq_length % (unit * parts):
        because: dict[str, Any] = {f"{AT}.recipe": c.recipe, "train.micro_batch": t.micro_batch, "layout.tp": tp}
        because["layout.cp"] = run.layout.cp
        rule = f"micro_batch * seq_length of each rank must be a multiple of {unit} with train.fp8.recipe={c.recipe}"
        step = unit * parts // gcd(unit * parts, t.micro_batch)
        found.append(problem("train", t, "seq_length", rule, because, multiples(t.seq_length, step)))
    misfits = [linear for linear in linears if any(size % unit for size in linear.shape)]
    if misfits:
        bad = misfits[0]
        near = " x ".join(" or ".join(map(str, multiples(n, unit))) if n % unit else str(n) for n in bad.shape)
        because = {bad.matrices[0]: " x ".join(map(str, bad.shape)), "nearest sizes": near, "layout.tp": tp}
        because |= {"layout.etp": run.layout.etp} if run.layout.etp > 1 else {}
        because["sizes in multiples of"] = unit
        rule = "the outputs and inputs of its linears, on each rank, must be whole blocks of scales"
        if len(misfits) < len(linears):
            ends = (".".join(name.rsplit(".", 2)[1:]) for linear in misfits for name in linear.matrices)
            rule += f", or leave them out: {AT}.exclude={[*c.exclude, *(f'*.{end}' for end in dict.fromkeys(ends))]}"
        sizes = {size for linear in linears for size in linear.shape}
        fitting = tuple(n for n in BUILT_IN[SEAM] if not any(size % find_recipe(n).unit for size in sizes))
        found.append(problem(AT, c, "recipe", rule, because, fitting))
    return found
