"""torchtitan: its TOML, of any version from 2024 until TOML was given up in February 2026.

Names, defaults and meanings are those of torchtitan/config/job_config.py; older names are in OLDER.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from phalanx.config.importers.torchtitan_models import FLAVORS, YARN_FROM, Flavor
from phalanx.config.importers.translation import (
    OFF,
    Becomes,
    BuiltIn,
    ByHand,
    ByValue,
    ConfigImporter,
    ForeignKey,
    ForeignText,
    Imported,
    Missing,
    Refused,
    Rule,
    Translation,
    off_or,
    one_of,
    real,
    whole,
)
from phalanx.config.synonyms import NOT_BUILT

TELLING = (
    "job",
    "training",
    "parallelism",
    "activation_checkpoint",
    "lr_scheduler",
    "profiling",
    "metrics",
    "experimental",
)
"""Sections of its TOML; two of them must be there."""
OLDER = {
    "parallelism.data_parallel_shard_degree": ("training.data_parallel_shard_degree", "training.data_parallel_degree"),
    "parallelism.data_parallel_replicate_degree": ("training.data_parallel_replicate_degree",),
    "parallelism.tensor_parallel_degree": ("training.tensor_parallel_degree",),
    "parallelism.fsdp_reshard_after_forward": ("training.fsdp_reshard_after_forward",),
    "parallelism.pipeline_parallel_degree": ("experimental.pipeline_parallel_degree",),
    "parallelism.pipeline_parallel_schedule": ("experimental.pipeline_parallel_schedule",),
    "parallelism.context_parallel_degree": ("experimental.context_parallel_degree",),
    "parallelism.context_parallel_rotate_method": ("experimental.context_parallel_rotate_method",),
    "parallelism.enable_async_tensor_parallel": ("experimental.enable_async_tensor_parallel",),
    "training.local_batch_size": ("training.batch_size",),
    "lr_scheduler.warmup_steps": ("training.warmup_steps",),
    "lr_scheduler.min_lr_factor": ("lr_scheduler.lr_min",),
    "checkpoint.enable": ("checkpoint.enable_checkpoint",),
    "compile.enable": ("training.compile",),
    "model.hf_assets_path": ("model.tokenizer_path",),
    "debug.seed": ("training.seed",),
    "debug.deterministic": ("training.deterministic",),
    "quantize.linear.float8.filter_fqns": ("float8.filter_fqns",),
    "quantize.linear.float8.recipe_name": ("float8.recipe_name",),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": ("float8.enable_fsdp_float8_all_gather",),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (
        "float8.precompute_float8_dynamic_scale_for_fsdp",
    ),
    "quantize.linear.float8.force_recompute_fp8_weight_in_bwd": ("float8.force_recompute_fp8_weight_in_bwd",),
    "quantize.linear.mx.filter_fqns": ("mx.filter_fqns",),
    "quantize.linear.mx.recipe_name": ("mx.recipe_name",),
    "quantize.grouped_mm.float8.fqns": ("float8.moe_fqns_prototype",),
}
"""Today's name -> earlier ones."""


class Torchtitan(ConfigImporter):
    title = "torchtitan"
    looks_for = "TOML with sections such as [training] and [parallelism]"

    def recognises(self, source: ForeignText) -> tuple[str, ...]:
        found = re.findall(r"^\s*\[([a-z_]+)[\].]", source.text, re.MULTILINE)
        marks = tuple(f"[{name}]" for name in TELLING if name in found)
        return marks if len(marks) > 1 else ()

    def translate(self, source: ForeignText) -> Imported:
        try:
            data = tomllib.loads(source.text)
        except tomllib.TOMLDecodeError as error:
            place = re.search(r" \(at line (\d+)", str(error))
            rule = f"is not TOML ({re.sub(r' .at line.*', '', str(error))})"
            raise source.refuse(rule, int(place[1]) if place else 0) from None
        t = Titan(self.title, list(keys_of(data, source.text)))
        ranks = source.ranks
        flavor = model(t)
        for part in (layout, batches, lengths, schedule, optimizer, memory, quantization, data_keys, saving, logging):
            part(t, flavor, ranks)
        t.apply(RULES)
        return t.finish(ranks)


class Titan(Translation):
    """A translation that finds a key under its earlier names too."""

    def now(self, name: str) -> str:
        """The name under which a key is given here."""
        return self.first(name, *OLDER.get(name, ()))

    def get(self, name: str, default: Any = None) -> Any:
        return self.value(self.now(name), default)


def keys_of(data: Mapping[str, Any], text: str, prefix: str = "") -> Iterator[ForeignKey]:
    """Every leaf with its dotted name and line."""
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from keys_of(value, text, f"{path}.")
        else:
            yield ForeignKey(path, value, line_of(path, text))


def line_of(path: str, text: str) -> int:
    """The line of a key in its section; 0 if it is written in another way."""
    section, _, name = path.rpartition(".")
    inside = section == ""
    for number, row in enumerate(text.splitlines(), 1):
        head = re.match(r"\s*\[([^\]]+)\]", row)
        if head:
            inside = head[1].strip() == section
        elif inside and re.match(rf"\s*[\"']?{re.escape(name)}[\"']?\s*=", row):
            return number
    return 0


def model(t: Titan) -> Flavor | None:
    """Sizes by name and flavor."""
    name, kind = t.value("model.name", "llama3"), t.value("model.flavor", "debugmodel")
    flavor = FLAVORS.get((str(name).removeprefix("torchtitan."), str(kind)))
    if flavor is None:
        others = ", ".join(f for n, f in FLAVORS if n == name)
        says = f"its sizes are in torchtitan's code: {name} {kind} (known of {name}: {others or 'none'})"
        t.by_hand("model.family", says, "model.name", "model.flavor")
        return None
    length = whole(t.value("training.seq_len", 2048))
    old = t.has(
        "model.tokenizer_path"
    )  # then the vocabulary was the tokenizer's, and rotary embeddings were not scaled
    for key, value in flavor.sizes.items():
        if key in ("vocab_size", "num_hidden_layers") and old and kind == "debugmodel":
            says = "of its tokenizer" if key == "vocab_size" else "2, 8 or 6 by its version"
            t.by_hand(f"model.{key}", f"torchtitan's debugmodel has no lasting size: {says}")
        elif not (key == "rope_scaling" and old):
            t.set(f"model.{key}", value, "model.name", "model.flavor")
    t.set("model.max_position_embeddings", length, "training.seq_len")
    if flavor.yarn is not None and length > YARN_FROM:
        t.set("model.rope_scaling", dict(flavor.yarn), "model.name", "model.flavor")
    for what, says in flavor.lacks:
        t.differ(what, says)
    t.differ("initial values: embedding with std 1, head with 1 / sqrt(dim), outputs by depth", "all with one std")
    t.set("data.document_attention", flavor.documents, "model.flavor")
    return flavor


def layout(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    names = {"tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree"}
    for ours, theirs in names.items():
        name = t.now(f"parallelism.{theirs}")
        t.set(f"layout.{ours}", lambda name=name: whole(t.value(name, 1)), name)  # type: ignore[misc]
    sharding(t, ranks)
    stages(t)
    experts = flavor is not None and "num_experts_per_tok" in flavor.sizes
    for ours, theirs in {"ep": "expert_parallel_degree", "etp": "expert_tensor_parallel_degree"}.items():
        name = f"parallelism.{theirs}"
        if experts:
            t.set(f"layout.{ours}", lambda name=name: expert_size(t, name), name)  # type: ignore[misc]
        t.apply({name: BuiltIn("the model has no experts")})
    rotate = t.now("parallelism.context_parallel_rotate_method")
    kinds: dict[Any, Rule] = {"allgather": Becomes("layout.cp_attention"), "alltoall": Missing("ring and allgather")}
    with_cp = t.setting("layout.cp") not in (None, 1)
    t.apply({rotate: ByValue(kinds, Missing()) if with_cp else BuiltIn("has no effect without cp > 1")})


def expert_size(t: Titan, name: str) -> int:
    """Without expert parallelism, experts are divided like everything else there: over nothing."""
    ep = whole(t.value("parallelism.expert_parallel_degree", 1))
    return whole(t.value(name, 1)) if ep > 1 else 1


SHARD, REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"


def sharding(t: Titan, ranks: int | None) -> None:
    """FSDP over all ranks that are left (-1), HSDP with replicas, DDP if only replicas are asked for."""
    shard, replicate = t.now(SHARD), t.now(REPLICATE)
    of, copies = whole(t.value(shard, -1)), whole(t.value(replicate, 1))
    t.set("layout.sharding", 0 if of == 1 else 3, shard, replicate)
    if of != 1 and copies > 1:
        sizes = [whole(t.get(f"parallelism.{name}_degree", 1)) for name in ("tensor_parallel", "pipeline_parallel")]
        if of > 1:
            cp = whole(t.get("parallelism.context_parallel_degree", 1))
            t.set("layout.shard_group", of * cp, shard, replicate)
        elif ranks is not None:
            t.set("layout.shard_group", ranks // (sizes[0] * sizes[1] * copies), shard, replicate)
        else:
            t.by_hand("layout.shard_group", f"data-parallel ranks / {copies}; --ranks computes it")
    keep = t.now("parallelism.fsdp_reshard_after_forward")
    if of != 1:
        kept = {"always": True, "never": False, "default": t.setting("layout.pp") == 1}
        t.set("layout.reshard_after_forward", lambda: one_of(kept)(t.value(keep, "default")), keep)
    t.apply({keep: BuiltIn("has no effect without sharding")})


SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved"}
ZERO_BUBBLE = "schedules here: gpipe, 1f1b, interleaved and zb_h1"


def stages(t: Titan) -> None:
    name = t.now("parallelism.pipeline_parallel_schedule")
    more = (
        "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_microbatch_size",
    )
    if t.setting("layout.pp") in (None, 1):
        t.apply({key: BuiltIn("has no effect without pp > 1") for key in (name, *(f"parallelism.{m}" for m in more))})
        return
    kind = str(t.value(name, "1F1B")).lower()
    t.set("layout.schedule", lambda: one_of(SCHEDULES, ZERO_BUBBLE)(kind), name)
    each = f"parallelism.{more[0]}"
    layers = t.setting("model.num_hidden_layers")
    if kind == "interleaved1f1b":

        def chunks() -> int:  # two by default
            if not t.has(each):
                return 2
            less = sum(whole(t.value(f"parallelism.{m}", 1)) for m in more[1:3])
            total = -(-(layers + less) // whole(t.value(each)))
            return max(1, total // whole(t.setting("layout.pp")))

        t.set("layout.virtual_stages", chunks, name, *([each] if layers else []))
    t.apply({f"parallelism.{m}": BuiltIn("stages are divided by cost, embedding and head included") for m in more[:3]})


def batches(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    """A local batch is a micro-batch, but for pipelines, which cut it up."""
    local, total = t.now("training.local_batch_size"), "training.global_batch_size"
    part = "parallelism.pipeline_parallel_microbatch_size"
    if t.setting("layout.pp") not in (None, 1):
        t.set("train.micro_batch", lambda: whole(t.value(part, 1)), part)
    else:
        t.set("train.micro_batch", lambda: whole(t.value(local, 8)), local)
    if whole(t.value(total, -1)) > 0:
        t.set("train.global_batch", lambda: whole(t.value(total)), total)
        return
    dp = data_parallel(t, ranks)
    if dp is None:
        says = f"{whole(t.value(local, 8))} * data-parallel ranks; --ranks computes it"
        t.by_hand("train.global_batch", says, total, local)
    else:
        t.set("train.global_batch", lambda: whole(t.value(local, 8)) * dp, local, total)


def data_parallel(t: Titan, ranks: int | None) -> int | None:
    """Data-parallel ranks, if the text or --ranks says how many."""
    of, copies = whole(t.get(SHARD, -1)), whole(t.get(REPLICATE, 1))
    if ranks is not None:
        sizes = [t.setting(f"layout.{name}") or 1 for name in ("tp", "pp", "cp")]
        return max(1, ranks // (sizes[0] * sizes[1] * sizes[2]))
    return of * copies if of > 0 else None


def lengths(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    t.set("train.steps", lambda: whole(t.value("training.steps", 10000)), "training.steps")
    t.set("train.seq_length", lambda: whole(t.value("training.seq_len", 2048)), "training.seq_len")
    on, every = "validation.enable", "validation.freq"
    if t.value(on, False):
        t.set("train.eval_interval", lambda: whole(t.value(every, 10)), on, every)
        samples = ("validation.steps", "validation.local_batch_size")
        dp, count = data_parallel(t, ranks), whole(t.value(samples[0], -1))
        if dp is not None and count > 0:
            t.set("train.eval_samples", lambda: count * whole(t.value(samples[1], 8)) * dp, *samples)
        else:
            t.by_hand("train.eval_samples", "validation steps * local batch * data-parallel ranks", *samples)
        t.by_hand("data.valid", "token files of the validation set", "validation.dataset", "validation.dataset_path")
        t.apply({"validation.seq_len": Missing("train.seq_length holds for evaluation too")})
    for name in t.names():
        if name.startswith("validation.") and not t.settled(name):
            t.built_in(name, OFF if name == on else f"has no effect while {on} is false")


def schedule(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    """Warm-up, then constant, then a decay over the last part; without a decay_ratio the decay begins at once."""
    steps = whole(t.value("training.steps", 10000))
    total_name, ratio = "lr_scheduler.total_steps", "lr_scheduler.decay_ratio"
    total = whole(t.value(total_name, steps))
    if t.has(total_name):
        t.set("optim.decay_steps", total, total_name)
    warm = t.now("lr_scheduler.warmup_steps")
    warmup = min(whole(t.value(warm, 200)), max(0, min(total, steps) - 1))
    t.set("optim.warmup_steps", warmup, warm)
    kind, factor = "lr_scheduler.decay_type", t.now("lr_scheduler.min_lr_factor")
    at_once = not t.has(ratio) or round(total * real(t.value(ratio))) >= total - warmup
    style = str(t.value(kind, "linear"))
    if at_once:
        known = {"linear": "linear", "cosine": "cosine"}
        t.set("optim.schedule", lambda: one_of(known, "decays here: linear and cosine")(style), kind, ratio)
    else:
        t.set("optim.schedule", "wsd", ratio)
        t.set("optim.wsd_decay_steps", round(total * real(t.value(ratio))), ratio)
        t.apply({kind: ByValue({"linear": BuiltIn("wsd decays linearly")}, Missing("wsd decays linearly"))})
    lr = real(t.value("optimizer.lr", 8e-4))
    t.set("optim.min_lr", lambda: lr * real(t.value(factor, 0.0)), factor)


def optimizer(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    kinds = {"AdamW": "adamw"}
    says = "optimizers here: adamw, muon, lion and sgd (Adam's decay is not decoupled)"
    t.set("optim.name", lambda: one_of(kinds, says)(t.value("optimizer.name", "AdamW")), "optimizer.name")
    t.differ("weight decay of norms", "norms and biases have none")


SAVED = "needs more memory than there; blocks are chosen one by one by train.recompute_budget_gib"


def memory(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    """Selective by ops keeps what matmuls and attention gave; by number it recomputes every so many layers."""
    mode, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    kind, by = str(t.value(mode, "selective")), str(t.value(option, "2"))
    if kind == "selective" and by == "op":
        t.set("train.recompute", "pointwise", mode, option)
    elif kind in ("full", "none"):
        t.set("train.recompute", kind, mode)
        t.apply({option: BuiltIn("has no effect without mode selective")})
    elif kind == "selective" and by == "1":
        t.set("train.recompute", "full", mode, option)
    elif t.has(mode):
        t.by_hand("train.recompute_budget_gib", "every so many layers there, chosen by cost here: GiB of a GPU", mode)
        t.apply({option: Missing("layers are chosen by cost: train.recompute_budget_gib")})
    else:
        t.differ("activation_checkpoint.mode=selective of every second layer", SAVED)
    t.apply({name: BuiltIn("of mode memory_budget") for name in ("activation_checkpoint.memory_budget",)})


PLACES = {
    "attention.wq": "*.q_proj.*",
    "attention.wk": "*.k_proj.*",
    "attention.wv": "*.v_proj.*",
    "attention.wo": "*.o_proj.*",
    "feed_forward.w1": "*.gate_proj.*",
    "feed_forward.w2": "*.down_proj.*",
    "feed_forward.w3": "*.up_proj.*",
}
NEVER = ("output", "router.gate", "tok_embeddings")  # embedding, head and routers are never quantized here
RECIPES = {"None": "tensorwise", "tensorwise": "tensorwise", "rowwise": "rowwise"}


def quantization(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    given = t.value("model.converters", [])
    converters = [c.strip() for c in given.split(",")] if isinstance(given, str) else list(given)
    old, float8, mx = "float8.enable_float8_linear", "quantize.linear.float8.", "quantize.linear.mx."
    on = next((c for c in converters if c.rpartition(".")[2] in ("float8", "mx", "mxfp8")), None)
    if t.value(old, False) or (on is not None and on.endswith("float8")):
        recipe = t.now(f"{float8}recipe_name")
        says = "recipes here: tensorwise, delayed, rowwise, blockwise"
        t.set("train.fp8.recipe", lambda: one_of(RECIPES, says)(t.value(recipe)), "model.converters", old, recipe)
        excluded(t, t.now(f"{float8}filter_fqns"))
    elif on is not None:
        recipe = t.now(f"{mx}recipe_name")
        t.set("train.fp8.recipe", "mxfp8", "model.converters", recipe)
        excluded(t, t.now(f"{mx}filter_fqns"))
    elif not converters:
        t.apply({"model.converters": BuiltIn("none")})
    experts = t.now("quantize.grouped_mm.float8.fqns")
    quantized = t.setting("train.fp8.recipe") is not None
    if quantized and t.has(experts):
        t.built_in(experts, "experts are quantized like linears")
    for name in t.names():
        if name.startswith(("quantize.", "float8.", "mx.")) and not t.settled(name):
            detail = "how the fastest kernels do it" if quantized else "has no effect: nothing is quantized"
            t.built_in(name, detail)


def excluded(t: Titan, name: str) -> None:
    listed = t.value(name, [])
    places = [p.strip() for p in listed.split(",")] if isinstance(listed, str) else list(listed)
    rest = [place for place in places if place not in NEVER]

    def patterns() -> list[str]:
        unknown = [place for place in rest if place not in PLACES]
        if unknown:
            raise Refused(f"train.fp8.exclude takes globs of Hugging Face names; not known: {', '.join(unknown)}")
        return [PLACES[place] for place in rest]

    if t.has(name):
        t.set("train.fp8.exclude", patterns, name)


def data_keys(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    source = t.value("training.dataset_path") or t.value("training.dataset", "c4_test")
    says = f"token files of {source}: phalanx data prepare FILES --tokenizer FOLDER -o PREFIX"
    t.by_hand("data.paths", says, "training.dataset", "training.dataset_path")
    assets = t.now("model.hf_assets_path")
    t.set("data.tokenizer", lambda: str(t.value(assets, "./tests/assets/tokenizer")), assets)
    for name in t.names():
        if name.startswith("training.dataloader."):
            t.built_in(name, "tokens are read ahead by one thread")


def saving(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    on = t.now("checkpoint.enable")
    if t.value(on, False):
        t.set("checkpoint.interval", lambda: whole(t.value("checkpoint.interval", 500)), on, "checkpoint.interval")
        t.set(
            "checkpoint.keep_last", lambda: whole(t.value("checkpoint.keep_latest_k", 10)), "checkpoint.keep_latest_k"
        )
        mode = "checkpoint.async_mode"
        t.set("checkpoint.background", t.value(mode, "disabled") != "disabled", mode)
        t.apply(CHECKPOINTS)
    for name in t.names():
        if name.startswith("checkpoint.") and not t.settled(name):
            t.built_in(name, "a run is saved at its end" if name == on else f"has no effect while {on} is false")


CHECKPOINTS: Mapping[str, Rule] = MappingProxyType(
    {
        "checkpoint.folder": BuiltIn("checkpoints/ in the run's folder"),
        "checkpoint.initial_load_path": ByHand("init_from", "a Hugging Face folder"),
        "checkpoint.last_save_model_only": BuiltIn("weights/ of each checkpoint is a Hugging Face folder"),
        "checkpoint.last_save_in_hf": BuiltIn("weights/ of each checkpoint is a Hugging Face folder"),
        "checkpoint.model_weights_only": BuiltIn("weights/ of each checkpoint is a Hugging Face folder"),
        "checkpoint.export_dtype": Missing("phalanx export RUN --dtype writes another one"),
        "checkpoint.interval_type": ByValue(
            {"steps": BuiltIn("in steps")}, Missing("checkpoints are counted in steps")
        ),
    }
)


def logging(t: Titan, flavor: Flavor | None, ranks: int | None) -> None:
    t.set("dir", lambda: str(t.value("job.dump_folder", "./outputs")), "job.dump_folder")
    on, every = "profiling.enable_profiling", "profiling.profile_freq"
    freq, steps = whole(t.value(every, 10)), t.setting("train.steps") or 0
    if t.value(on, False) and freq <= steps:
        t.set("train.profile", f"{freq}:{freq + 1}", on, every)
    for name in t.names():
        if name.startswith("profiling.") and name not in MEMORY and not t.settled(name):
            off = OFF if name == on else f"has no effect while {on} is false"
            t.built_in(name, "traces/ in the run's folder" if t.value(on, False) else off)
    if t.value("metrics.enable_wandb", False):
        t.set("log.wandb", "torchtitan", "metrics.enable_wandb")


MEMORY = ("profiling.enable_memory_snapshot", "profiling.save_memory_snapshot_folder")
COMPILE = NOT_BUILT["compile"]
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "optimizer.lr": Becomes("optim.lr", real, 8e-4),
        "optimizer.beta1": Becomes("optim.beta1", real, 0.9),
        "optimizer.beta2": Becomes("optim.beta2", real, 0.95),
        "optimizer.eps": Becomes("optim.eps", real, 1e-8),
        "optimizer.weight_decay": Becomes("optim.weight_decay", real, 0.1),
        "optimizer.implementation": BuiltIn("one fused update"),
        "optimizer.fused": BuiltIn("one fused update"),
        "optimizer.early_step_in_backward": off_or(Becomes("optim.in_backward", bool)),
        "training.max_norm": Becomes("optim.clip_grad", real, 1.0),
        "training.mixed_precision_param": Becomes(
            "train.precision", one_of({"bfloat16": "bf16", "float32": "fp32"}), "bfloat16"
        ),
        "training.mixed_precision_reduce": ByValue(
            {"float32": BuiltIn("gradients are summed in fp32")}, Missing("gradients are summed in fp32")
        ),
        "training.dtype": ByValue(
            {"float32": BuiltIn("masters are fp32")},
            Missing("masters are fp32; optim.masters=split stores the missing bits"),
        ),
        "training.enable_cpu_offload": off_or(Missing("train.offload_layers moves activations to the host")),
        "training.gc_freq": BuiltIn("collected between steps"),
        "training.gc_debug": BuiltIn("collected between steps"),
        "training.debug_moe_force_load_balance": off_or(Becomes("model.router_forced_balance", bool)),
        "debug.moe_force_load_balance": off_or(Becomes("model.router_forced_balance", bool)),
        "debug.seed": Becomes("train.seed", whole),
        "training.seed": Becomes("train.seed", whole),
        "debug.deterministic": BuiltIn("a run of one layout always has the same bits"),
        "training.deterministic": BuiltIn("a run of one layout always has the same bits"),
        "debug.deterministic_warn_only": BuiltIn("a run of one layout always has the same bits"),
        "metrics.log_freq": Becomes("log.interval", whole, 10),
        "metrics.enable_tensorboard": Becomes("log.tensorboard", bool, False),
        "metrics.enable_wandb": BuiltIn(OFF),
        "metrics.save_tb_folder": BuiltIn("tb/ in the run's folder"),
        "metrics.disable_color_printing": BuiltIn("no colours in files"),
        "metrics.enable_color_printing": BuiltIn("no colours in files"),
        "metrics.rank_0_only": BuiltIn("numbers are of all ranks, written once"),
        "metrics.save_for_all_ranks": off_or(Missing("numbers are of all ranks, written once")),
        "job.description": Missing("a comment in the config, or log.wandb_name"),
        "job.print_config": BuiltIn("config.yaml in the run's folder is the resolved config"),
        "job.print_args": BuiltIn("config.yaml in the run's folder is the resolved config"),
        "job.save_config_file": BuiltIn("config.yaml in the run's folder is the resolved config"),
        "job.use_for_integration_test": BuiltIn("of its tests"),
        "job.custom_config_module": ByValue({"": BuiltIn("none")}, Missing("code of a package: module:NAME")),
        "model.norm_type": ByValue(
            {"rmsnorm": BuiltIn("RMSNorm"), "fused_rmsnorm": BuiltIn("RMSNorm")}, Missing("these families have RMSNorm")
        ),
        "model.print_after_conversion": BuiltIn("phalanx plan prints the model"),
        "compile.enable": ByValue({False: BuiltIn("torch.compile is not used here either")}, Missing(COMPILE)),
        "training.compile": ByValue({False: BuiltIn("torch.compile is not used here either")}, Missing(COMPILE)),
        "compile.components": BuiltIn("torch.compile is not used"),
        "compile.backend": BuiltIn("torch.compile is not used"),
        "parallelism.enable_async_tensor_parallel": BuiltIn("layout.tp_overlap=auto"),
        "experimental.enable_async_tensor_parallel": BuiltIn("layout.tp_overlap=auto"),
        "parallelism.disable_loss_parallel": off_or(Missing("with tp the loss is always parallel")),
        "training.disable_loss_parallel": off_or(Missing("with tp the loss is always parallel")),
        "parallelism.enable_compiled_autograd": off_or(Missing(COMPILE)),
        "experimental.enable_compiled_autograd": off_or(Missing(COMPILE)),
        "parallelism.pipeline_parallel_split_points": ByHand("layout.stages", "blocks of each stage"),
        "parallelism.module_fqns_per_model_part": ByHand("layout.stages", "blocks of each stage"),
        "parallelism.pipeline_parallel_expert_parallel_overlap": BuiltIn("of the schedule DualPipeV"),
        "parallelism.context_parallel_load_balancer": BuiltIn("each rank has two chunks, which cost the same"),
        "parallelism.expert_parallel_comm_backend": BuiltIn("layout.dispatch=auto"),
        "profiling.enable_memory_snapshot": off_or(Missing("phalanx plan says what memory holds")),
        "profiling.save_memory_snapshot_folder": BuiltIn("phalanx plan says what memory holds"),
        "comm.train_timeout_seconds": Becomes("train.timeout_s", real),
        "comm.init_timeout_seconds": BuiltIn("train.timeout_s"),
        "comm.trace_buf_size": BuiltIn("a lost peer is named with what it waited for"),
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": BuiltIn("matmuls are kept"),
        "activation_checkpoint.early_stop": BuiltIn("only what is needed is recomputed"),
        "activation_checkpoint.preserve_rng_state": BuiltIn("random numbers follow from train.seed and the position"),
        "memory_estimation.enable": BuiltIn("phalanx plan forecasts memory"),
        "memory_estimation.enabled": BuiltIn("phalanx plan forecasts memory"),
        "memory_estimation.disable_fake_mode": BuiltIn("phalanx plan forecasts memory"),
        "fault_tolerance.enable": off_or(Missing("a lost peer ends the run with 6; started again, it continues")),
        "experimental.custom_import": ByValue({"": BuiltIn("none")}, Missing("code of a package: module:NAME")),
        "experimental.custom_args_module": ByValue({"": BuiltIn("none")}, Missing("code of a package: module:NAME")),
    }
)
IMPORTER = Torchtitan()
