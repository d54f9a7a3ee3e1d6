"""The `optim` section: what all optimizers share, and the learning-rate schedule. Each optimizer adds its own fields in
its file."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar, Literal

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    seam: ClassVar[str] = "optimizer"  # whose members add fields (base/registry.py)
    named_by: ClassVar[str] = "name"

    name: str = "adamw"
    """Optimizer: adamw (AdamW with decoupled weight decay; Loshchilov & Hutter, 2019), muon (orthogonalised momentum of
    matrices; Jordan et al., 2024), lion (Chen et al., 2023), sgd (with momentum), or one of your own as
    PACKAGE.MODULE:NAME. Its own fields stand beside the shared ones."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    masters: Literal["whole", "split"] = "whole"
    """How the masters of bf16 weights are stored: whole, as fp32 numbers (4 bytes a parameter beside the weight); or
    split: only the bits that the weight lacks (2.125 bytes), with the same results to the bit."""
    moments: Literal["master", "bf16", "fp8", "8bit"] = "master"
    """Dtype of the optimizer's moments: that of the masters (fp32); bf16, which takes half the memory and is rounded at
    every step; fp8, which takes a quarter: E4M3 with a power of two for every 32 elements, Adam's second moment as its
    square root, stochastically rounded; or 8bit, a quarter too: block-wise dynamic quantization (Dettmers et al., 2022)
    with a scale for every 64 elements, as in bitsandbytes' AdamW8bit."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings; norms, biases and attention sinks have none."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""
    clip_by: Literal["model", "bucket"] = "model"
    """Whose gradient norm clip_grad limits: that of the whole model; or, with in_backward, that of each bucket by
    itself (layout.bucket_mb), which then depends on how parameters are put into buckets."""
    qk_clip: float = 0.0
    """Largest score of attention (q k^T times its scale) that a head may reach, such as 100; 0 turns QK-clip off. After
    the update of a step in which a head exceeded it, its query and key weights are multiplied by the square root of
    threshold / largest; where heads share keys, or the rotated part of latent attention's keys, those are left alone
    and the queries' take the whole ratio (Kimi Team, "Kimi K2", 2025)."""
    in_backward: bool = False
    """Apply the gradients of each bucket (layout.bucket_mb) as soon as they are complete, in the middle of backward,
    and free them: gradients then take the memory of a bucket instead of 4 bytes a parameter. Needs one micro-batch a
    step, and clip_by=bucket or clip_grad=0, because the norm of the model is known only when all gradients are."""
    schedule: str = "cosine"
    """Learning-rate schedule after warm-up: constant, linear, cosine, wsd, inverse_sqrt, or one of your own as
    PACKAGE.MODULE:NAME."""
    warmup_steps: int = 0
    """Steps of linear warm-up from 0 to lr."""
    decay_steps: int | None = None
    """Step at which the decay ends; unset: train.steps."""
    wsd_decay_steps: int | None = None
    """wsd only: length of the final decay; unset: a tenth of decay_steps."""
    lr_scale: dict[str, float] = field(default_factory=dict)
    """Learning-rate factor for parameters whose name matches a glob, such as {"*embed_tokens*": 0.1}; the first match
    counts."""
    restart: bool = False
    """Where a checkpoint that the run goes on from is of another optimizer: begin with a state of zero, and count its
    steps anew, instead of stopping. Later checkpoints have this optimizer's own state, which is then resumed."""
    fallback: OptimConfig | None = None
    """The optimizer of parameters that the one of optim.name does not take, such as norms and embeddings: its name
    (unset: adamw), lr, weight_decay, moments, lr_scale and own fields. lr and weight_decay that are not given are those
    of optim. Its rate follows the same schedule."""

    @property
    def for_fallback(self) -> dict[str, float]:
        """Fields that optim.fallback takes over unless it has its own."""
        return {"lr": self.lr, "weight_decay": self.weight_decay}
