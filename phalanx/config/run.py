"""Run: the whole config of a run as one typed object. Reading files is in `read.py`, rules are in `check.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from phalanx.base import tree
from phalanx.base.records import SEAM as SINK
from phalanx.base.registry import lasting
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.places import place
from phalanx.config.cluster import ClusterConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.model_config import ModelConfig
from phalanx.models.registry import configs
from phalanx.nn.adapter import AdapterConfig, completed_lora
from phalanx.nn.objective import TaskConfig, completed_task
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import completed
from phalanx.schedule.generators import SEAM as SCHEDULE

MOST_STAGES = 100_000  # in a ramp-up that are counted
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def token_count(value: Any) -> Any:
    """`15B`, `1.5e9`, `300M`, `2_000_000` as an integer; anything that is not a whole number is returned as it is."""
    text = str(value).replace("_", "").strip().lower()
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e[+]?\d{1,2})?)([kmbt]?)", text)
    if isinstance(value, bool) or found is None:
        return value
    number = Decimal(found[1]) * UNITS[found[2]]
    return int(number) if number == int(number) else value


TokenCount = Annotated[int, tree.FromText(token_count)]

BUDGET_AT = (
    6  # the step of a run (or of its continuation) whose time budget is shown; the step before it warms the profiler up
)


@dataclass(frozen=True, kw_only=True)
class RampConfig:
    start: int
    """Global batch at the beginning."""
    increment: int
    """Added at each of the equal steps on the way to train.global_batch."""
    samples: int
    """Number of samples over which the ramp runs."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What happens when a step's loss or gradient norm is NaN, infinite or a spike; such a step is never applied."""

    policy: Literal["skip", "stop", "rollback"] = "skip"
    """skip the step; stop the run (exit 5); or rollback: continue from the previous checkpoint with the data after the
    bad step."""
    sigmas: float | None = None
    """A loss or gradient norm is a spike if it exceeds the window's mean by more than this many standard deviations;
    unset: none is."""
    window: int = 128
    """Steps whose losses and norms are kept for judging the next (half of them must be there)."""
    max_rollbacks: int = 3
    """rollback: attempts to pass one bad step, each from an older checkpoint, before the run stops."""
    replicas_interval: int | None = None
    """Every so many steps, compare hashes of what data-parallel ranks hold in common; unset: never. A difference stops
    the run (exit 5). With sharding, weights are distributed again in each step, so only changes since then are seen;
    with layout.sharding=0 everything is."""


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """Matmuls of the layers' linears and experts in FP8 or FP4. Embedding, head, routers, attention itself and MLA's
    down-projections are never included."""

    recipe: str
    """Formats and scales: tensorwise (one scale per tensor), delayed (the same, from earlier steps), rowwise,
    blockwise (DeepSeek-V3's 1x128 and 128x128); mxfp8 and nvfp4 are emulated: the numerics of Blackwell at
    the speed of train.precision, not measured on hardware. Or one of your own as PACKAGE.MODULE:NAME."""
    exclude: list[str] = field(default_factory=list)
    """Globs of Hugging Face names of linears that stay in train.precision, such as "*.o_proj.*"."""
    end_layers: int = 0
    """This many layers at each end of the model stay in train.precision."""
    last_steps: int = 0
    """This many steps at the end of the run are in train.precision: the weights settle without quantization noise
    (NVIDIA's method for NVFP4)."""
    accumulate: Literal["mixed", "fast", "precise"] = "mixed"
    """Sums inside the GEMMs: fast (the tensor cores' own), precise (moved to fp32 at intervals), mixed (forward fast,
    backward precise)."""
    history: int = 1024
    """delayed: the number of steps from whose largest values scales are computed; 1: only the last step."""
    shadow_interval: int | None = None
    """Every so many steps (and at the first and the last), also compute the gradients in train.precision, and report
    how far they differ."""
    max_lost: float | None = None
    """A linear that loses more than this fraction of a tensor's values (to zero, or clamped to the largest) falls back
    to train.precision; unset: none."""
    min_cosine: float | None = None
    """A linear whose weight gradient has a lower cosine with that in train.precision (shadow_interval) falls back to
    it; unset: none."""

    @property
    def may_rest(self) -> bool:
        """Whether linears may use train.precision at times, for a step or for good: their weights must then be
        available."""
        return self.last_steps > 0 or self.shadow_interval is not None or self.max_lost is not None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int | None = None
    """Optimizer steps of the whole run. This or train.tokens is required."""
    tokens: TokenCount | None = None
    """Instead of steps: tokens of the whole run, such as 15B, 300M or 1.5e9, rounded up to whole steps."""
    global_batch: int
    """Sequences per step, over all ranks."""
    micro_batch: int
    """Sequences per micro-batch, on one rank."""
    seq_length: int
    """Tokens per sequence."""
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Dtype of weights and activations; bf16 and fp16 keep fp32 masters, moments and gradients."""
    fp8: Fp8Config | None = None
    """Matmuls of linears in FP8; unset: in train.precision."""
    recompute: Literal["none", "pointwise", "selective", "long", "full"] = "none"
    """Activations recomputed in backward (activation checkpointing): none, pointwise (norms and MLP activations:
    cheap), selective (inside attention), long (all but attention, for long sequences; MLPs in slices), full (whole
    blocks)."""
    recompute_ops: list[str] = field(default_factory=list)
    """Further ops to recompute, by name: norm, qkv, rope, attention, conv, scan, delta, up, activation, dropout,
    experts, mlp, layer, block."""
    recompute_budget_gib: float | None = None
    """GiB that a rank may use in total, as forecast by `phalanx plan`: what is recomputed is then chosen block by
    block, at the least cost."""
    freeze: list[str] = field(default_factory=list)
    """Globs of Hugging Face names of tensors that are not trained, such as "*.mlp.*": they have no gradients and no
    optimizer state."""
    offload_layers: int = 0
    """Layers of each stage, from its first, whose activations are offloaded to host memory between forward and
    backward, copied while the device computes. Such a run has no CUDA graphs."""
    kernels: Literal["auto", "plain", "triton", "optional"] = "auto"
    """Implementations of the ops: auto (the fastest that run here), plain (PyTorch alone), triton, optional (triton,
    with attention and MLP from the packages of phalanx[kernels])."""
    plain_ops: list[str] = field(default_factory=list)
    """Ops that run plain in any case: norm, swiglu, rope, loss, adamw, route, permute, grouped, quant, attention, mlp.
    For comparisons."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Replay blocks as CUDA graphs: auto (on a GPU; with pipeline stages if memory allows), on, off. Same numbers,
    less work for the host."""
    seed: int = 1234
    """Seed of initial weights, data order and dropout."""
    deterministic: bool = False
    """The same bits whatever the data-parallel size, layout.sharding, schedule and number of stages are: gradients are
    added up in one binary tree over the micro-batches of a step (dp a power of two). Takes time and log2(micro-batches
    of a rank) more gradient buffers."""
    batch_invariant: bool = False
    """The bits of a token's logits depend on its own sequence alone: not on the rest of the batch, on the pieces in
    which a prompt is read, or on layout.tp; and training's forward has the same ones as generation. Slower. Dense
    models with full weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: GPUs if there are any."""
    rampup: RampConfig | None = None
    """Start with a smaller global batch and grow to train.global_batch."""
    eval_interval: int | None = None
    """Evaluate every so many steps; unset: never."""
    eval_samples: int = 64
    """Sequences per validation set and evaluation."""
    eval_tasks: list[str] = field(default_factory=list)
    """Tasks of lm-evaluation-harness, by name or as YAML files, on which the model is scored too every
    train.eval_interval steps (needs the extra phalanx[eval])."""
    eval_limit: int | None = None
    """Questions of each of train.eval_tasks at most; unset: all."""
    eval_data: str | None = None
    """Folder of the tasks' data sets, each under its name on the Hub; unset: the Hub's cache."""
    samples: str | None = None
    """JSONL file of prompts that the model continues as it trains: lines of {"prompt": "..."}, a text or token ids;
    unset: none."""
    samples_interval: int | None = None
    """Continue train.samples every so many steps, and after the last one."""
    samples_tokens: int = 64
    """Tokens of each continuation at most."""
    samples_temperature: float = 0.8
    """Temperature of the continuations, whose random numbers follow from train.seed; 0: always the likeliest token."""
    loss_scale: float = 65536.0
    """fp16: the first loss scale."""
    loss_scale_window: int = 1000
    """fp16: good steps after which the scale doubles."""
    loss_scale_hysteresis: int = 2
    """fp16: overflows before the scale halves."""
    loss_scale_min: float = 1.0
    """fp16: the scale never goes below this."""
    max_skipped: int = 50
    """Stop (exit 5) after this many skipped steps in a row."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """What happens when losses or gradients are NaN, infinite or spikes."""
    timeout_s: float = 600.0
    """A collective that takes longer means a lost peer."""
    time_limit_s: float | None = None
    """Seconds after which the run finishes its step, saves and ends with exit code 75, as on SIGTERM; unset: no
    limit."""
    profile: str | None = None
    """Steps of rank 0 to record, FIRST:END (10:13 is 10, 11 and 12), as traces for Perfetto in the run's traces/
    folder; FIRST:END:all: of all ranks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", token_count(self.tokens))

    @cached_property
    def last_step(self) -> int:
        """The number of the run's last step: `steps`, or the first step by which `tokens` tokens are consumed. 0 if
        neither is set."""
        if self.steps is not None or not isinstance(self.tokens, int):
            return self.steps or 0
        wanted, consumed, step = -(-self.tokens // max(1, self.seq_length)), 0, 0
        for size, stop in self.ramp_stages():
            count = max(0, -(-(min(stop, wanted) - consumed) // size))
            consumed, step = consumed + count * size, step + count
        return step + max(0, -(-(wanted - consumed) // max(1, self.global_batch)))

    def ramp_stages(self) -> list[tuple[int, int]]:
        """(global batch, consumed samples at which it ends) of each stage of the ramp-up. None for stages larger than
        global_batch, or for a ramp that its rules refuse."""
        ramp = self.rampup
        if ramp is None or min(ramp.start, ramp.increment, ramp.samples) < 1:
            return []
        stages = (self.global_batch - ramp.start) // ramp.increment + 1
        return [
            (ramp.start + i * ramp.increment, -(-(i + 1) * ramp.samples // stages))
            for i in range(min(stages, MOST_STAGES))
        ]


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    interval: int | None = None
    """Print a step line every so many steps; unset: every step in log.txt and where the output is not a terminal; on a
    terminal one every 2 seconds, after a minute one every 10. metrics.jsonl always has every step."""
    tensorboard: bool = False
    """Write TensorBoard files to the run's tb/ folder (needs the extra phalanx[tensorboard])."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs the extra phalanx[wandb])."""
    wandb_entity: str | None = None
    """User or team that owns the log.wandb project; unset: the default of the logged-in user."""
    wandb_name: str | None = None
    """Name of the run in Weights & Biases; unset: that of the run's folder."""
    wandb_group: str | None = None
    """Group of runs in Weights & Biases that this one belongs to."""
    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the run in Weights & Biases."""
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """More places to which every number of the run is written: sink by name or PACKAGE.MODULE:NAME, with its own
    fields."""
    report: bool = True
    """Write report.html with the loss curve at the end."""
    budget: bool | None = None
    """After the first steps, show where the time of a step goes; unset: on GPUs, in runs of 100 steps or more."""

    def __post_init__(self) -> None:
        named = {lasting(SINK, name): fields for name, fields in self.sinks.items()}
        object.__setattr__(self, "sinks", named)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The config of a run. `dir` is the run's folder."""

    model: Annotated[ModelConfig, tree.Choices(configs)]
    train: TrainConfig
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    lora: AdapterConfig | None = None
    """Adapters beside frozen weights, such as LoRA; unset: all weights are trained."""
    optim: OptimConfig = field(default_factory=lambda: completed(OptimConfig()))
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    cluster: ClusterConfig | None = None
    """Where and how `phalanx launch` starts the run; unset: by cluster.yaml beside the config."""
    dir: str = "runs/default"
    """Folder of the run: config, metrics, checkpoints, report."""
    init_from: str | None = None
    """A Hugging Face folder whose weights the run starts from. It supplies family, sizes and tokenizer where they
    are unset."""
    model_source: str | None = None
    """The Hugging Face folder of sizes and tokenizer: set by init_from and by model.from.

    Its token ids, generation settings and chat template are copied into checkpoints.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "optim", completed(self.optim))
        object.__setattr__(self, "task", completed_task(self.task))
        schedule = lasting(SCHEDULE, self.layout.schedule)
        if schedule != self.layout.schedule:
            object.__setattr__(self, "layout", replace(self.layout, schedule=schedule))
        object.__setattr__(self, "lora", None if self.lora is None else completed_lora(self.lora))


def checkpoints_of(run: Run) -> Path:
    """The folder (or the prefix in object storage) of a run's checkpoints."""
    return place(run.checkpoint.dir or str(Path(run.dir) / "checkpoints"))


def profiled_steps(text: str | None) -> range | None:
    """`10:13`, or `10:13:all` -> steps 10, 11, 12; None if it is not of that form."""
    found = re.fullmatch(r"(\d+):(\d+)(:all)?", text or "")
    return range(int(found[1]), int(found[2])) if found else None
