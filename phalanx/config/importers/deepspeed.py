"""DeepSpeed: its JSON. It has no model, no length and no data: those are set by hand, and so is every "auto".

Names, defaults and meanings are those of deepspeed/runtime (constants.py, zero/config.py, lr_schedules.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from phalanx.config.importers.translation import (
    OFF,
    Becomes,
    BuiltIn,
    ConfigImporter,
    ForeignKey,
    ForeignText,
    Imported,
    Missing,
    OpenValue,
    Refused,
    Rule,
    Translation,
    mebibytes,
    number,
    off_or,
    real,
    whole,
)

TELLING = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_allow_untested_optimizer",
    "wall_clock_breakdown",
    "steps_per_print",
)
"""Top-level keys; one of them must be there."""
AUTO = "the trainer that reads the JSON fills it in"


class DeepSpeed(ConfigImporter):
    title = "DeepSpeed"
    looks_for = "JSON with keys such as train_batch_size and zero_optimization"

    def recognises(self, source: ForeignText) -> tuple[str, ...]:
        if not source.text.lstrip().startswith("{"):
            return ()
        return tuple(name for name in TELLING if f'"{name}"' in source.text)

    def translate(self, source: ForeignText) -> Imported:
        try:
            data = json.loads(source.text)
        except json.JSONDecodeError as error:
            raise source.refuse(f"is not JSON ({error.msg})", error.lineno) from None
        if not isinstance(data, dict):
            raise source.refuse("must be an object of JSON", 1)
        t = Translation(self.title, list(keys_of(data)))
        for part in (batches, precision, zero, optimizer, schedule, recomputation, parallel, by_hand):
            part(t, source.ranks)
        sections_off(t)
        t.apply(RULES)
        return t.finish(source.ranks)


def keys_of(data: Mapping[str, Any], prefix: str = "") -> Iterator[ForeignKey]:
    """Every leaf with its dotted name; "auto" is open. A list of lists or objects is one value."""
    for name, value in data.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from keys_of(value, f"{path}.")
        else:
            yield ForeignKey(path, OpenValue("auto", AUTO) if value == "auto" else value)


TOTAL, EACH, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def data_ranks(t: Translation, ranks: int | None) -> int | None:
    """Data-parallel ranks: those that tensor and sequence parallelism leave."""
    if ranks is None:
        return None
    inner = [whole(t.value(name, 1)) for name in (AUTOTP, SEQUENCE, PIPES)]
    return max(1, ranks // (inner[0] * inner[1] * inner[2]))


def batches(t: Translation, ranks: int | None) -> None:
    """total = per GPU * accumulation * data-parallel ranks; two of them, or one and --ranks, give the others."""
    dp = data_ranks(t, ranks)
    if t.has(EACH):
        t.set("train.micro_batch", lambda: whole(t.value(EACH)), EACH)
    elif t.has(TOTAL) and dp is not None and not t.is_open(TOTAL) and not t.is_open(STEPS):
        t.set("train.micro_batch", lambda: divided(t, dp), TOTAL, STEPS)
    else:
        t.by_hand("train.micro_batch", f"{EACH} is not in the text; --ranks computes it")
    if t.has(TOTAL):
        t.set("train.global_batch", lambda: whole(t.value(TOTAL)), TOTAL)
    elif t.has(EACH) and dp is not None and not t.is_open(EACH) and not t.is_open(STEPS):
        t.set("train.global_batch", lambda: whole(t.value(EACH)) * whole(t.value(STEPS, 1)) * dp, EACH, STEPS)
    elif t.is_open(EACH) or t.is_open(STEPS):
        t.by_hand("train.global_batch", f"{EACH} * {STEPS} * data-parallel ranks")
    else:
        parts = whole(t.value(EACH, 1)) * whole(t.value(STEPS, 1))
        t.by_hand("train.global_batch", f"{parts} * data-parallel ranks; --ranks computes it")
    if t.is_open(STEPS):
        t.by_hand("train.global_batch", f"{STEPS}: {AUTO}", STEPS)
    t.apply({STEPS: BuiltIn("micro-batches follow from train.global_batch, train.micro_batch and the ranks")})


def divided(t: Translation, dp: int) -> int:
    total, parts = whole(t.value(TOTAL)), dp * whole(t.value(STEPS, 1))
    if total % parts:
        raise Refused(f"must be a multiple of {parts}, ranks * {STEPS}")
    return total // parts


SCALE = {
    "fp16.min_loss_scale": ("train.loss_scale_min", 1, real),
    "fp16.loss_scale_window": ("train.loss_scale_window", 1000, whole),
    "fp16.hysteresis": ("train.loss_scale_hysteresis", 2, whole),
}


def precision(t: Translation, ranks: int | None) -> None:
    """bf16 wins if both are on; with "auto" the trainer decides."""
    fp16, bf16 = "fp16.enabled", t.first("bf16.enabled", "bfloat16.enabled")
    half = t.value(fp16, False) is True
    if t.value(bf16, False) is True:
        t.set("train.precision", "bf16", bf16)
        half = False
    elif half:
        t.set("train.precision", "fp16", fp16)
    elif t.is_open(fp16) or t.is_open(bf16):
        t.by_hand("train.precision", f"bf16, fp16 or fp32 ({AUTO})", fp16, bf16)
    else:
        t.set("train.precision", "fp32", fp16, bf16)
    for name in (fp16, bf16):
        if t.has(name) and not t.settled(name):
            t.built_in(name, "train.precision says which")
    power, static = "fp16.initial_scale_power", "fp16.loss_scale"
    if half:
        t.set("train.loss_scale", lambda: 2.0 ** whole(t.value(power, 16)), power)
        for name, (ours, default, convert) in SCALE.items():
            t.set(ours, lambda n=name, d=default, c=convert: c(t.value(n, d)), name)  # type: ignore[misc]
    if t.value(static) not in (None, 0):
        t.apply({static: Missing("the loss scale is dynamic: train.loss_scale is the first one")})
    t.apply({static: BuiltIn("dynamic, as here")})
    t.apply({name: BuiltIn("has no effect without fp16") for name in (power, *SCALE)})
    low = "bf16.bf16_master_weights_and_grads"
    t.apply({low: off_or(Missing("masters are fp32; optim.masters=split stores only the bits that weights lack"))})


STAGE = "zero_optimization.stage"


def zero(t: Translation, ranks: int | None) -> None:
    of = "zero_optimization."
    t.set("layout.sharding", lambda: whole(t.value(STAGE, 0)), STAGE)
    stage = t.setting("layout.sharding")
    bucket = f"{of}reduce_bucket_size"
    if t.has(bucket):
        size = 2 if t.setting("train.precision") in ("bf16", "fp16") else 4
        t.set("layout.bucket_mb", lambda: mebibytes(t.value(bucket), size), bucket)
    groups = t.first(f"{of}mics_shard_size", f"{of}zero_hpz_partition_size")
    if t.has(groups) and number(t.value(groups, 0)) > 1 and stage:
        t.set("layout.shard_group", lambda: whole(t.value(groups)), groups)
        if groups.endswith("zero_hpz_partition_size"):
            t.set("layout.shard_across", "optimizer", groups)
    t.apply({groups: BuiltIn("all data-parallel ranks shard together")})
    for name in t.names():
        if name.startswith((f"{of}offload_optimizer", f"{of}offload_param", f"{of}cpu_offload")):
            if not t.settled(name):
                offload(t, name)
    t.apply(ZERO)


def offload(t: Translation, name: str) -> None:
    """Weights and optimizer state stay on the GPU here."""
    section = name.rpartition(".")[0]
    value = t.value(name)
    if value in ("none", None, False) or t.value(f"{section}.device") in ("none", None) and name.count(".") > 1:
        t.built_in(name, OFF)
    else:
        t.missing(name, "weights and optimizer state stay on the GPU; train.offload_layers moves activations")


OVERLAP = BuiltIn("exchanges overlap with computation where that is faster")
FOLDER = BuiltIn("weights/ of each checkpoint is a Hugging Face folder")
BUCKETS = BuiltIn("weights are gathered by segments of blocks: layout.prefetch")
ZERO_KEYS: Mapping[str, Rule] = MappingProxyType(
    {
        "overlap_comm": OVERLAP,
        "contiguous_gradients": BuiltIn("gradients are flat buffers"),
        "reduce_scatter": BuiltIn("gradients are reduced and scattered"),
        "allgather_partitions": BuiltIn("weights are gathered"),
        "allgather_bucket_size": BUCKETS,
        "stage3_prefetch_bucket_size": BUCKETS,
        "prefetch_bucket_size": BUCKETS,
        "stage3_max_live_parameters": BUCKETS,
        "max_live_parameters": BUCKETS,
        "stage3_max_reuse_distance": BUCKETS,
        "max_reuse_distance": BUCKETS,
        "stage3_param_persistence_threshold": BUCKETS,
        "param_persistence_threshold": BUCKETS,
        "sub_group_size": BuiltIn("the update is one pass over flat buffers"),
        "round_robin_gradients": BuiltIn("gradients are reduced where they stay"),
        "ignore_unused_parameters": BuiltIn("every weight of a model is used"),
        "stage3_gather_16bit_weights_on_model_save": BuiltIn("weights/ of each checkpoint is a Hugging Face folder"),
        "stage3_gather_fp16_weights_on_model_save": FOLDER,
        "gather_16bit_weights_on_model_save": FOLDER,
        "gather_fp16_weights_on_model_save": FOLDER,
        "elastic_checkpoint": BuiltIn("a checkpoint has no layout"),
        "load_from_fp32_weights": BuiltIn("masters are loaded"),
        "memory_efficient_linear": BuiltIn("weights are read when backward needs them"),
        "grad_hooks": BuiltIn("no hooks"),
        "zero_quantized_weights": off_or(Missing("with train.fp8, weights travel as FP8 values")),
        "zero_quantized_gradients": off_or(Missing("gradients are summed in fp32")),
        "zero_quantized_nontrainable_weights": off_or(Missing("lora.base=nf4 stores frozen weights quantized")),
    }
)
ZERO = {f"zero_optimization.{name}": rule for name, rule in ZERO_KEYS.items()}
TYPE, PARAMS = "optimizer.type", "optimizer.params."
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd", "muon": "muon"}
OTHERS = "optimizers here: adamw, muon, lion and sgd"


def optimizer(t: Translation, ranks: int | None) -> None:
    """Adam's decay is decoupled there too, unless adam_w_mode is false."""
    theirs = str(t.value(TYPE, "")).lower()
    kind = OPTIMIZERS.get(theirs)
    plain = f"{PARAMS}adam_w_mode"
    if t.value(plain) is False and theirs == "adam":
        kind = None
        t.missing(plain, "weight decay is decoupled")
    if not t.has(TYPE):
        t.by_hand("optim.lr", "the script makes the optimizer")
        return t.apply({name: Missing() for name in t.names() if name.startswith("optimizer.")})
    if kind is None:
        t.missing(TYPE, OTHERS)
        t.by_hand("optim.name", f"{t.value(TYPE)} is not built; {OTHERS}")
    else:
        t.set("optim.name", kind, TYPE)
    lr, decay, betas, eps = (f"{PARAMS}{name}" for name in ("lr", "weight_decay", "betas", "eps"))
    if t.has(lr):
        t.set("optim.lr", lambda: real(t.value(lr)), lr)
    else:
        t.set("optim.lr", 1e-3, lr)
    t.set("optim.weight_decay", lambda: real(t.value(decay, 0.0)), decay)
    if kind in ("adamw", "lion"):
        defaults = (0.9, 0.999) if kind == "adamw" else (0.9, 0.99)
        for i, name in enumerate(("beta1", "beta2")):
            t.set(f"optim.{name}", lambda i=i: real(t.value(betas, defaults)[i]), betas)  # type: ignore[misc]
    if kind == "adamw":
        t.set("optim.eps", lambda: real(t.value(eps, 1e-8)), eps)
    slowest = t.setting("optim.beta2")
    coarse = isinstance(slowest, float) and slowest > 0.99  # bf16 would round smaller changes away
    eight = Missing("with beta2 > 0.99 bf16 moments would not change; optim.moments=8bit is smaller still")
    t.apply({"bf16.bf16_optimizer_states": off_or(eight if coarse else Becomes("optim.moments", lambda _: "bf16"))})
    momentum = f"{PARAMS}momentum"
    if kind in ("sgd", "muon"):
        t.set("optim.momentum", lambda: real(t.value(momentum, 0.0 if kind == "sgd" else 0.95)), momentum)
    t.apply({name: Missing(f"{kind or 'no optimizer here'} has none") for name in (betas, eps, momentum)})
    bias = f"{PARAMS}bias_correction"
    if t.value(bias) is False:
        t.missing(bias, "Adam's bias correction is always on")
    t.apply({f"{PARAMS}{name}": BuiltIn("one fused update") for name in ("torch_adam", "adam_w_mode", "fused")})
    t.apply({bias: BuiltIn("Adam's bias correction is always on")})
    rest = "of an optimizer that is not built" if kind is None else "the optimizer here has no such field"
    t.apply({name: Missing(rest) for name in t.names() if name.startswith("optimizer.") and not t.settled(name)})


KIND, OF = "scheduler.type", "scheduler.params."
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def schedule(t: Translation, ranks: int | None) -> None:
    kind = t.value(KIND)
    if kind is None:
        if not t.has(KIND):
            t.by_hand("optim.schedule", "the script makes the scheduler, if there is one")
        return
    if str(kind) not in SCHEDULES:
        t.by_hand("optim.schedule", f"{kind} is not built; here: constant, linear, cosine, wsd, inverse_sqrt", KIND)
        return t.apply({n: Missing("of a schedule that is not built") for n in t.names() if n.startswith(OF)})
    t.set("optim.schedule", SCHEDULES[str(kind)], KIND)
    warm, total, peak = f"{OF}warmup_num_steps", f"{OF}total_num_steps", f"{OF}warmup_max_lr"
    t.set("optim.warmup_steps", lambda: whole(t.value(warm, 1000)), warm)
    if kind != "WarmupLR" and t.has(total):
        t.set("train.steps", lambda: whole(t.value(total)), total)
    same = t.setting("optim.lr")
    if t.has(peak) and not t.is_open(peak) and real(t.value(peak)) != same:
        t.missing(peak, f"optim.lr is the peak, and optimizer.params.lr says {same}")
    elif t.is_open(peak):
        t.by_hand("optim.lr", f"{peak}: {AUTO}", peak)
    t.apply({peak: BuiltIn("the same as the optimizer's lr")})
    floor = f"{OF}cos_min_ratio"
    if kind == "WarmupCosineLR" and isinstance(same, float):
        t.set("optim.min_lr", lambda: same * real(t.value(floor, 1e-4)), floor)
    how = f"{OF}warmup_type"
    if t.value(how, "log") != "linear":
        if t.has(how):
            t.missing(how, FROM)
        else:
            t.differ("warm-up by the logarithm of the step", FROM)
    t.apply({how: BuiltIn(FROM)})
    for name in (f"{OF}warmup_min_lr", f"{OF}warmup_min_ratio"):
        if t.is_open(name):
            t.built_in(name, "warm-up begins at 0")
        elif t.has(name):
            zero_start = number(t.value(name)) == 0
            t.apply({name: BuiltIn("warm-up begins at 0") if zero_start else Missing("warm-up begins at 0")})


FROM = "warm-up is linear"


def recomputation(t: Translation, ranks: int | None) -> None:
    """The section says how layers are stored that the model's code recomputes."""
    named = [name for name in t.names() if name.startswith("activation_checkpointing.")]
    if named:
        t.by_hand("train.recompute", "full, if the model's code recomputes layers (activation checkpointing)")
    host = "activation_checkpointing.cpu_checkpointing"
    t.apply({host: off_or(Missing("train.offload_layers=N moves the activations of N layers to the host"))})
    t.apply({name: BuiltIn("activations between blocks are sharded along tokens, in planned memory") for name in named})


AUTOTP, SEQUENCE, PIPES = "tensor_parallel.autotp_size", "sequence_parallel_size", "pipeline.stages"


def parallel(t: Translation, ranks: int | None) -> None:
    if t.has(AUTOTP):
        t.set("layout.tp", lambda: whole(t.value(AUTOTP)), AUTOTP)
    if t.has(SEQUENCE):
        t.set("layout.cp", lambda: whole(t.value(SEQUENCE)), SEQUENCE)
        t.set("layout.cp_ulysses", lambda: whole(t.value(SEQUENCE)), SEQUENCE)
    if t.has(PIPES) and not isinstance(t.value(PIPES), str):
        t.set("layout.pp", lambda: whole(t.value(PIPES)), PIPES)


def by_hand(t: Translation, ranks: int | None) -> None:
    t.by_hand("model.family", "a DeepSpeed JSON has no model: a family and its sizes, or init_from=FOLDER")
    t.by_hand("train.seq_length", "a DeepSpeed JSON has none")
    if t.setting("train.steps") is None:
        t.by_hand("train.steps", "a DeepSpeed JSON has none, or train.tokens")
    t.by_hand("data.paths", "a DeepSpeed JSON has no data")


SECTIONS = {
    "compression_training": "compression of a trained model is not built",
    "sparse_attention": "attention here: causal, windows, chunks; no block-sparse patterns",
    "data_efficiency": "curricula and dropped tokens are not built",
    "curriculum_learning": "curricula are not built",
    "progressive_layer_drop": "layers are never dropped",
    "eigenvalue": "not built",
    "quantize_training": "train.fp8 is what trains in 8 bits",
    "autotuning": "phalanx bench sweep tries combinations; phalanx plan says what fits",
    "elasticity": "the batch stays what train.global_batch says, whatever the ranks are",
    "flops_profiler": "the step budget (log.budget), MFU and phalanx plan say where time goes",
    "aio": "nothing is offloaded to disks",
    "amp": "train.precision",
    "hybrid_engine": "phalanx serve and generate",
    "compile": "torch.compile is not used; what exists: train.kernels and train.cuda_graphs",
    "zero_optimization.zenflow": "the optimizer runs on the GPU",
    "torch_autocast": "train.precision holds for all of a model; FP8 is train.fp8",
    "csv_monitor": "metrics.jsonl always has the numbers",
}


def sections_off(t: Translation) -> None:
    """Sections with a switch: its other keys have no effect while it is off."""
    for name in t.names():
        section = next((s for s in SECTIONS if name == s or name.startswith(f"{s}.")), None)
        if section is None or t.settled(name):
            continue
        if t.value(f"{section}.enabled") is False:
            t.built_in(name, OFF if name.endswith(".enabled") else f"has no effect while {section} is off")
        else:
            t.missing(name, SECTIONS[section])


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "gradient_clipping": Becomes("optim.clip_grad", real, 1.0),
        "steps_per_print": Becomes("log.interval", whole),
        "wall_clock_breakdown": off_or(Becomes("log.budget", bool)),
        "memory_breakdown": off_or(BuiltIn("phalanx plan, and a report when memory runs out")),
        "dump_state": off_or(BuiltIn("config.yaml in the run's folder")),
        "zero_allow_untested_optimizer": BuiltIn("every optimizer works at every stage"),
        "zero_force_ds_cpu_optimizer": BuiltIn("the optimizer runs on the GPU"),
        "prescale_gradients": BuiltIn("gradients are summed in fp32, and divided by the tokens of the step"),
        "gradient_predivide_factor": BuiltIn("gradients are summed in fp32, and divided by the tokens of the step"),
        "communication_data_type": Missing("gradients are summed in fp32; weights travel in train.precision"),
        "data_types.grad_accum_dtype": BuiltIn("gradients are summed in fp32"),
        "fp16.auto_cast": BuiltIn("tokens need no cast"),
        "fp16.consecutive_hysteresis": off_or(Missing()),
        "fp16.fp16_master_weights_and_grads": off_or(Missing("masters and gradients are fp32")),
        "bf16.immediate_grad_update": BuiltIn("gradients are added up as they are made"),
        "tensorboard.enabled": Becomes("log.tensorboard", bool),
        "tensorboard.output_path": BuiltIn("tb/ in the run's folder"),
        "tensorboard.job_name": BuiltIn("tb/ in the run's folder"),
        "wandb.project": Becomes("log.wandb", str),
        "wandb.enabled": BuiltIn("log.wandb names the project"),
        "wandb.group": Becomes("log.wandb_group", str),
        "wandb.team": Becomes("log.wandb_entity", str),
        "cuda_visible_devices": Missing("set it where the run starts"),
        "sparse_gradients": off_or(Missing("gradients are dense")),
        "seed": Becomes("train.seed", whole),
        "checkpoint.tag_validation": BuiltIn("every commit of a checkpoint is checked"),
        "checkpoint.load_universal": BuiltIn("a checkpoint has no layout"),
        "checkpoint.use_node_local_storage": off_or(Missing("checkpoint.dir names one place for all")),
        "tensor_parallel.tp_grain_size": BuiltIn("any size of a layer works at any tp"),
        "disable_allgather": off_or(Missing()),
        "dataloader_drop_last": BuiltIn("every step has its whole batch"),
    }
)
IMPORTER = DeepSpeed()
