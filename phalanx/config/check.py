"""Rules of a config's values: asks each room for its problems and adds the rules between sections. Rules that need a
plan, and the search for values that work, are in `forecast/check.py`.

Pure, except that it checks whether files exist (`Facts.files`).
"""

from __future__ import annotations

import errno
import math
import os
from typing import Any

from phalanx.base.errors import ConfigError, PhalanxError, Problem
from phalanx.base.own_fields import made_of
from phalanx.base.records import find_sink
from phalanx.base.registry import NotFound
from phalanx.base.rules import (
    at_least,
    divisors,
    missing_checkpoint,
    multiples,
    no_effect,
    problem,
    within,
)
from phalanx.checkpoint.check import check as check_checkpoint
from phalanx.checkpoint.check import check_source
from phalanx.checkpoint.keep import list_checkpoints
from phalanx.checkpoint.manifest import parse
from phalanx.checkpoint.places import is_remote
from phalanx.config.batch_invariant_check import check_batch_invariant
from phalanx.config.cluster import check_cluster
from phalanx.config.deterministic_check import check_deterministic
from phalanx.config.device_check import Facts, check_device
from phalanx.config.limits import OTHERS
from phalanx.config.model_source import check_weights
from phalanx.config.optim_check import check_memory
from phalanx.config.run import BUDGET_AT, LogConfig, Run, checkpoints_of, profiled_steps
from phalanx.config.scan_check import check_scans
from phalanx.config.schedule_check import check_schedule
from phalanx.config.task_check import check_task
from phalanx.config.units_check import check_units
from phalanx.data.check import check as check_data
from phalanx.layout.check import check as check_layout
from phalanx.models.check import check as check_model
from phalanx.nn.objective import find_objective
from phalanx.nn.recompute import OPS as RECOMPUTED
from phalanx.optim.check import check as check_optim
from phalanx.sequence.shard import SequenceShard


def check_values(run: Run, facts: Facts) -> list[Problem]:
    """All rules that values alone can break. Call `config.limits.check_limits` first."""
    more = run.model.num_blocks - len(run.model.layer_blocks)
    blocks = max(len(run.model.layer_blocks), 1) + more
    evaluates = run.train.eval_interval is not None
    return [
        *facts.env,
        *check_model(run.model, tp=run.layout.tp, seq_length=run.train.seq_length),
        *check_beside(run),
        *check_units(run, facts.files),
        *check_layout(
            run.layout,
            world_size=facts.world_size,
            blocks=blocks,
            beside_layers=more,
            experts=run.model.routed_experts,
            expert_size=run.model.expert_size,
            kv_heads=run.model.kv_heads,
            attention_dropout=getattr(run.model, "attention_dropout", 0.0),
        ),
        *check_scans(run),
        *check_schedule(run, facts.world_size),
        *check_train(run),
        *check_deterministic(run, facts.world_size),
        *check_batch_invariant(run),
        *check_batch(run, facts),
        *check_device(run, facts),
        *check_optim(run.optim, steps=run.train.last_step),
        *check_memory(run, facts.world_size),
        *check_task(run, facts),
        *check_eval_tasks(run, facts),
        *check_data(run.data, evaluates=evaluates, files=facts.files),
        *check_checkpoint(run.checkpoint, files=facts.files),
        *check_log(run, facts),
        *check_cluster(run.cluster),
        *check_start(run, facts),
        *(check_folder(run) if facts.files else ()),
    ]


def check_train(run: Run) -> list[Problem]:
    c = run.train
    found = check_length(run) + at_least(
        "train", c, 1, "global_batch", "micro_batch", "seq_length", "eval_interval", "eval_samples", "max_skipped"
    )
    found += check_guard(run)
    found += within("train", c, "timeout_s", "(0, inf)") + within("train", c, "time_limit_s", "(0, inf)", (None,))
    if not 0 <= c.seed < 2**63:
        found.append(problem("train", c, "seed", "must be an integer in [0, 2**63)", {}, (1234,)))
    found += check_profile(run)
    if c.eval_interval is None:
        found += no_effect("train", c, ("eval_samples",), "train.eval_interval", {"train.eval_interval": None})
    return found + check_samples(run) + check_loss_scale(run) + check_recompute(run)


NO_TEXT = "needs a model that continues text, and this one reads both ways"


def check_samples(run: Run) -> list[Problem]:
    """Text that is made during training."""
    c, own = run.train, ("samples_interval", "samples_tokens", "samples_temperature")
    if c.samples is None:
        return no_effect("train", c, own, "train.samples", {"train.samples": None})
    found = at_least("train", c, 1, "samples_interval", "samples_tokens")
    found += within("train", c, "samples_temperature", "[0, inf)")
    if c.samples_interval is None:
        rule = "must be set with train.samples"
        found.append(problem("train", c, "samples_interval", rule, {"train.samples": c.samples}, (100,)))
    if c.samples_tokens >= run.model.max_position_embeddings:
        rule, positions = "must leave a position for a prompt", run.model.max_position_embeddings
        because = {"model.max_position_embeddings": positions}
        found.append(problem("train", c, "samples_tokens", rule, because, (max(1, positions // 2),)))
    if run.data.tokenizer is None:
        rule = "needs data.tokenizer, which turns texts into tokens and back"
        found.append(problem("train", c, "samples", rule, {"data.tokenizer": None}, (None,)))
    found += no_text(run, "samples", None)
    return found


def no_text(run: Run, name: str, valid: Any) -> list[Problem]:
    """A key of `train` that makes the model generate, where it or its task reads both ways."""
    if run.model.both_ways:
        return [problem("train", run.train, name, NO_TEXT, {"model.family": run.model.family}, (valid,))]
    if find_objective(run.task.name).makes_prefix:
        rule = "needs causal attention: with prefixes, which a prompt would be, no text is generated yet"
        return [problem("train", run.train, name, rule, {"task.name": run.task.name}, (valid,))]
    return []


def check_eval_tasks(run: Run, facts: Facts) -> list[Problem]:
    """Tasks of lm-evaluation-harness during training."""
    c = run.train
    if not c.eval_tasks:
        return no_effect("train", c, ("eval_limit", "eval_data"), "train.eval_tasks", {"train.eval_tasks": []})
    found = at_least("train", c, 1, "eval_limit")
    if c.eval_interval is None:
        rule = "must be set with train.eval_tasks"
        found.append(problem("train", c, "eval_interval", rule, {"train.eval_tasks": c.eval_tasks}, (100,)))
    if run.data.tokenizer is None:
        rule = "needs data.tokenizer, which turns texts into tokens and back"
        found.append(problem("train", c, "eval_tasks", rule, {"data.tokenizer": None}, ([],)))
    found += no_text(run, "eval_tasks", [])
    if "lm_eval" in facts.missing:
        rule = "needs a package: pip install 'phalanx[eval]'"
        found.append(problem("train", c, "eval_tasks", rule, {"not installed": "lm_eval"}, ([],)))
    return found


def check_length(run: Run) -> list[Problem]:
    """The length of a run is given either in steps or in tokens."""
    c = run.train
    if c.tokens is None:
        if c.steps is None:
            rule = "is required, or train.tokens: how long the run is, such as train.steps=1000 or train.tokens=15B"
            return [problem("train", c, "steps", rule, {"train.tokens": None}, (1000,))]
        return at_least("train", c, 1, "steps")
    if c.steps is not None:
        return [
            problem(
                "train", c, "tokens", "excludes train.steps: leave one of them out", {"train.steps": c.steps}, (None,)
            )
        ]
    if not isinstance(c.tokens, int) or c.tokens < 1:
        return [problem("train", c, "tokens", "must be a whole number >= 1, such as 15B, 300M or 1.5e9", {}, (10**9,))]
    if c.last_step > OTHERS:
        because = {"steps": c.last_step, "train.global_batch": c.global_batch, "train.seq_length": c.seq_length}
        return [problem("train", c, "tokens", f"must be consumed in at most {OTHERS} steps", because, (OTHERS,))]
    return []


def check_recompute(run: Run) -> list[Problem]:
    """Ops to recompute exist in the model, and are named once; with a budget, none is named."""
    c, m = run.train, run.model
    absent = {"experts": not m.routed_experts, "dropout": getattr(m, "dropout", 0.0) == 0.0, "rope": not m.rotary}
    absent |= {"attention": not m.attends, "conv": not m.scans}
    absent |= {op: m.recurrence != op for op in ("scan", "delta")}
    known = tuple(name for name in RECOMPUTED if not absent.get(name))
    found = within("train", c, "recompute_budget_gib", "(0, inf)", (None,))
    unknown = [name for name in c.recompute_ops if name not in known]
    if unknown:
        because = {"model.family": m.family, "unknown": ", ".join(unknown)}
        found.append(
            problem("train", c, "recompute_ops", f"must name ops of the model among {', '.join(known)}", because, ([],))
        )
    if c.recompute_budget_gib is not None:
        budget = {"train.recompute_budget_gib": c.recompute_budget_gib}
        found += no_effect("train", c, ("recompute", "recompute_ops"), "recompute_budget_gib=null", budget)
    elif c.recompute == "full":
        found += no_effect(
            "train", c, ("recompute_ops",), "recompute other than full", {"train.recompute": c.recompute}
        )
    return found + check_offload(run)


def check_beside(run: Run) -> list[Problem]:
    """What is not built for models that read streams of tokens beside the text."""
    if not run.model.reads_beside:
        return []
    because = {"model.family": run.model.family}
    found = []
    if run.train.fp8 is not None:
        rule = "is not built for a model with an encoder beside its decoder"
        found.append(problem("train", run.train, "fp8", rule, because, (None,)))
    if run.layout.cp_degree == "dynamic":
        rule = "balances the documents of one text, and the model reads two: take fixed"
        found.append(problem("layout", run.layout, "cp_degree", rule, because, ("fixed",)))
    return found


def check_offload(run: Run) -> list[Problem]:
    """At most as many layers as there are; with CUDA graphs, no activations are offloaded."""
    c, layers = run.train, len(run.model.layer_blocks)
    found = []
    if c.cuda_graphs == "on" and c.offload_layers > 0:
        rule = "excludes train.offload_layers: type train.cuda_graphs=off or train.offload_layers=0"
        because = {"train.offload_layers": c.offload_layers}
        found.append(problem("train", c, "cuda_graphs", rule, because, ("off",)))
    if not 0 <= c.offload_layers <= max(layers, 0):
        because = {"model.num_hidden_layers": run.model.num_hidden_layers}
        found.append(problem("train", c, "offload_layers", "must be an integer in [0, layers]", because, (0, layers)))
    return found


def check_profile(run: Run) -> list[Problem]:
    """Steps to record exist, and so do those of the time budget."""
    c, found = run.train, []
    steps = profiled_steps(c.profile)
    if c.profile is not None and (steps is None or not 1 <= steps.start < steps.stop <= c.last_step + 1):
        rule = "must be FIRST:END or FIRST:END:all with 1 <= FIRST < END <= steps + 1"
        found.append(
            problem(
                "train",
                c,
                "profile",
                rule,
                {"train.steps": c.last_step},
                (f"{max(1, c.last_step - 2)}:{c.last_step + 1}",),
            )
        )
    if run.log.budget and c.last_step < BUDGET_AT:
        found.append(
            problem(
                "log", run.log, "budget", f"needs at least {BUDGET_AT} steps", {"train.steps": c.last_step}, (False,)
            )
        )
    return found


def check_loss_scale(run: Run) -> list[Problem]:
    c = run.train
    names = ("loss_scale", "loss_scale_window", "loss_scale_hysteresis", "loss_scale_min")
    if c.precision != "fp16":
        return no_effect("train", c, names, "train.precision=fp16", {"train.precision": c.precision})
    found = at_least("train", c, 1, "loss_scale_window", "loss_scale_hysteresis")
    found += within("train", c, "loss_scale", "(0, inf)") + within("train", c, "loss_scale_min", "(0, inf)")
    if c.loss_scale < c.loss_scale_min:
        found.append(
            problem(
                "train",
                c,
                "loss_scale",
                "must be >= loss_scale_min",
                {"train.loss_scale_min": c.loss_scale_min},
                (65536.0,),
            )
        )
    return found


def check_batch(run: Run, facts: Facts) -> list[Problem]:
    """How the global batch is divided: over data-parallel ranks, into micro-batches, and each of these along tokens
    over tp."""
    c, tp, cp, pp = run.train, run.layout.tp, run.layout.cp, run.layout.pp
    if min(c.global_batch, c.micro_batch, c.seq_length, tp, cp, pp) < 1:
        return []
    found = check_sequences(run)
    if facts.world_size % (tp * cp * pp):
        return found  # there is no valid data-parallel size; the layout's own problem says so
    dp = facts.world_size // (tp * cp * pp)
    unit = c.micro_batch * dp
    if c.global_batch % unit:
        because = {"micro_batch * dp": unit, "train.micro_batch": c.micro_batch, "dp": dp}
        found.append(
            problem(
                "train",
                c,
                "global_batch",
                "must be a multiple of micro_batch * dp",
                because,
                multiples(c.global_batch, unit),
            )
        )
    return found + check_rampup(run, unit)


def check_sequences(run: Run) -> list[Problem]:
    """Every shard of a micro-batch is divided along tokens over tp; every rank has both chunks of each sequence. The
    same holds for each stream of tokens beside the text, whose length is a field of the task."""
    return [found for stream in _streams(run) for found in check_lengths(run, *stream)]


def _streams(run: Run) -> list[tuple[str, Any, str]]:
    """Section and field of the length of each stream of tokens: the text, and those beside it."""
    beside = [f"{stream}_length" for stream in find_objective(run.task.name).makes_beside]
    made = [name for name in beside if (getattr(run.task, name, None) or 0) >= 1]
    return [("train", run.train, "seq_length"), *(("task", run.task, name) for name in made)]


def sequences_unit(run: Run) -> int:
    """The fewest sequences of a micro-batch of which tp divides the tokens that a rank has; 1 where no number helps."""
    tp, cp = run.layout.tp, run.layout.cp
    lengths = [getattr(section, name) for _, section, name in _streams(run)]
    if min(tp, cp) < 1 or min(lengths) < 2 * cp:
        return 1
    return tp // math.gcd(tp, *(part.size(length) for length in lengths for part in SequenceShard(0, cp).all))


def check_lengths(run: Run, at: str, section: Any, name: str) -> list[Problem]:
    c, tp, cp, length = run.train, run.layout.tp, run.layout.cp, getattr(section, name)
    if length < 2 * cp:
        rule = "must be >= 2 * cp: each rank has two chunks of a sequence"
        return [problem(at, section, name, rule, {"layout.cp": cp}, (2 * cp,))]
    unit = tp // math.gcd(tp, c.micro_batch)
    if all(part.size(length) % unit == 0 for part in SequenceShard(0, cp).all):
        return []
    because = {"train.micro_batch": c.micro_batch, "layout.tp": tp}
    if cp == 1:
        rule = f"micro_batch * {name} must be a multiple of tp"
        return [problem(at, section, name, rule, because, multiples(length, unit))]
    rule, because = (
        "micro_batch * a rank's tokens of each sequence must be a multiple of tp",
        {**because, "layout.cp": cp},
    )
    return [problem(at, section, name, rule, because, multiples(length, cp * unit))]


def check_guard(run: Run) -> list[Problem]:
    g, at = run.train.guard, "train.guard"
    found = (
        at_least(at, g, 2, "window")
        + at_least(at, g, 1, "max_rollbacks", "replicas_interval")
        + within(at, g, "sigmas", "(0, inf)", (6.0,))
    )
    if g.sigmas is None:
        found += no_effect(at, g, ("window",), "sigmas", {f"{at}.sigmas": None})
    if g.policy != "rollback":
        found += no_effect(at, g, ("max_rollbacks",), "policy=rollback", {f"{at}.policy": g.policy})
    elif run.checkpoint.interval is None:
        found.append(
            problem(
                at, g, "policy", "needs checkpoints to roll back to", {"checkpoint.interval": None}, ("skip", "stop")
            )
        )
    return found


def check_rampup(run: Run, unit: int) -> list[Problem]:
    """Every batch size during the ramp must be a whole number of micro-batches on every rank."""
    ramp, goal = run.train.rampup, run.train.global_batch
    if ramp is None:
        return []
    at = "train.rampup"
    found = at_least(at, ramp, 1, "start", "increment", "samples")
    if found:
        return found
    if ramp.start >= goal:
        return [problem(at, ramp, "start", "must be < train.global_batch", {"train.global_batch": goal})]
    if ramp.start % unit:
        rule = "must be a multiple of micro_batch * dp"
        found.append(problem(at, ramp, "start", rule, {"micro_batch * dp": unit}, multiples(ramp.start, unit)))
    if ramp.increment % unit:
        rule, steps = "must be a multiple of micro_batch * dp", divisors(ramp.increment, goal - ramp.start)
        found.append(problem(at, ramp, "increment", rule, {"micro_batch * dp": unit}, steps))
    if (goal - ramp.start) % ramp.increment:
        because = {"train.global_batch - start": goal - ramp.start}
        found.append(
            problem(
                at,
                ramp,
                "increment",
                "must divide train.global_batch - start",
                because,
                divisors(ramp.increment, goal - ramp.start),
            )
        )
    return found


def check_log(run: Run, facts: Facts) -> list[Problem]:
    found = at_least("log", run.log, 1, "interval")
    for name, off in (("tensorboard", False), ("wandb", None)):
        if getattr(run.log, name) and name in facts.missing:
            because = {"not installed": name}
            found.append(
                problem("log", run.log, name, f"needs a package: pip install 'phalanx[{name}]'", because, (off,))
            )
    return found + check_sinks(run.log) + check_wandb(run.log)


def check_sinks(log: LogConfig) -> list[Problem]:
    """Each sink exists and accepts its fields."""
    found: list[Problem] = []
    for name, fields in log.sinks.items():
        at = f"log.sinks.{name}"
        if name in SWITCHES:
            found.append(Problem(at, fields, f"is a sink of ours: {SWITCHES[name]}"))
            continue
        try:
            made_of(find_sink(name).Config, at, fields)
        except NotFound as error:
            found.append(Problem(at, fields, str(error)))
        except ConfigError as error:
            found += error.problems
    return found


SWITCHES = {
    "jsonl": "every run has its metrics.jsonl",
    "tensorboard": "type log.tensorboard=true",
    "wandb": "type log.wandb=PROJECT",
}
NOT_IN_PROJECT_NAMES = "/\\#?%:"  # W&B's own rule, as are the lengths below


def check_wandb(log: LogConfig) -> list[Problem]:
    if log.wandb is None:
        return no_effect(
            "log", log, ("wandb_entity", "wandb_name", "wandb_group", "wandb_tags"), "log.wandb", {"log.wandb": None}
        )
    found = []
    if not 1 <= len(log.wandb) <= 128 or set(log.wandb) & set(NOT_IN_PROJECT_NAMES):
        clean = "".join("-" if c in NOT_IN_PROJECT_NAMES else c for c in log.wandb)[:128]
        found.append(
            problem(
                "log",
                log,
                "wandb",
                f"must be a name of 1 to 128 characters without {NOT_IN_PROJECT_NAMES}",
                {},
                (clean or "phalanx",),
            )
        )
    for name in ("wandb_entity", "wandb_name", "wandb_group"):
        value = getattr(log, name)
        if value is not None and not 1 <= len(value) <= 128:
            found.append(problem("log", log, name, "must have 1 to 128 characters", {}, (None,)))
    if not all(1 <= len(tag) <= 64 for tag in log.wandb_tags):
        found.append(
            problem(
                "log",
                log,
                "wandb_tags",
                "must be words of 1 to 64 characters",
                {},
                ([tag[:64] for tag in log.wandb_tags if tag],),
            )
        )
    return found


def check_start(run: Run, facts: Facts) -> list[Problem]:
    if facts.files and run.lora is not None and (moved := check_base_of_run(run)):
        return moved
    if run.init_from is None:
        return []
    if run.checkpoint.load is not None:
        because = {"checkpoint.load": run.checkpoint.load}
        return [Problem("init_from", run.init_from, "has no effect together with checkpoint.load", because, (None,))]
    if not facts.files or continues(run):
        return []
    if not os.path.exists(run.init_from):
        return [missing_checkpoint("init_from", run.init_from)]
    return check_source(run.init_from, run.model.family) or check_weights(run)


def check_base_of_run(run: Run) -> list[Problem]:
    """The base that the newest checkpoint of a run with adapters names is where it was, or where init_from says."""
    try:
        newest = list_checkpoints(checkpoints_of(run))[-1:]
        base = parse(newest[0]).base if newest else None
    except (OSError, PhalanxError):  # said when it is loaded
        return []
    if (
        base is None
        or is_remote(base.folder)
        or os.path.exists(base.folder)
        or (run.init_from is not None and os.path.exists(run.init_from))
    ):
        return []
    rule = "must say where the base of the run's adapters is now"
    return [Problem("init_from", run.init_from, rule, {"it is no longer": base.folder})]


def continues(run: Run) -> bool:
    """Whether the run has checkpoints of its own; init_from is then no longer used."""
    try:
        return bool(list_checkpoints(checkpoints_of(run)))
    except (OSError, PhalanxError):
        return False


def check_folder(run: Run) -> list[Problem]:
    """The run's folder can be created or written to."""
    if not run.dir:
        return [Problem("dir", run.dir, "must name a folder", {}, ("runs/default",))]
    there = os.path.abspath(run.dir)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        return [
            Problem(
                "dir",
                run.dir,
                f"must be a folder ({errno.errorcode[errno.ENOTDIR]})",
                {"a file": there},
                _other_folders(run.dir),
            )
        ]
    if not os.access(there, os.W_OK | os.X_OK):
        rule = f"must be writable ({errno.errorcode[errno.EACCES]})"
        return [Problem("dir", run.dir, rule, {"folder": there}, _other_folders(run.dir))]
    return []


def _other_folders(path: str) -> tuple[str, ...]:
    return (f"{path.rstrip('/')}-2", "runs/default")
