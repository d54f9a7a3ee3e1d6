"""Rules of what a config asks of the machine: devices, dtypes, kernels; and what is known of the machine."""

from __future__ import annotations

from typing import Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.registry import near
from phalanx.base.rules import problem
from phalanx.config.run import Run
from phalanx.ops.attention.flash import flash_fits
from phalanx.ops.dense.gated_mlp import gated_mlp_fits
from phalanx.ops.op import EXTRA, switches


@dataclass(frozen=True)
class Facts:
    """What a run is checked against. The defaults describe a machine that can do everything, as for a plan on a laptop.

    device_count  GPUs of this machine; None: unknown. local_ranks: ranks that share them
    world_follows nobody chose the number of ranks: it is what the layout needs, and another with another layout
    env           problems already found in the environment or in options
    missing       optional packages that are not installed
    no_optional_kernels     (op, why): ops whose kernels from phalanx[kernels] cannot run
    capability    compute capability of NVIDIA GPUs; None: of the CPU, where narrow formats are emulated
    files         look whether paths exist
    """

    world_size: int = 1
    local_ranks: int = 1
    world_follows: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    device_count: int | None = None
    device_name: str = "CPU"
    bf16_ok: bool = True
    fp16_ok: bool = True
    triton_ok: bool = True
    capability: tuple[int, int] | None = None
    no_optional_kernels: tuple[tuple[str, str], ...] = ()
    env: tuple[Problem, ...] = ()
    missing: tuple[str, ...] = ()
    files: bool = True


def check_device(run: Run, facts: Facts) -> list[Problem]:
    c, found = run.train, []
    because: dict[str, Any]
    if c.device == "cuda" and facts.device_count == 0:
        found.append(problem("train", c, "device", "needs a GPU", {"GPUs": 0}, ("cpu", "auto")))
    elif facts.device == "cuda" and facts.device_count is not None and facts.local_ranks > facts.device_count:
        because = {"GPUs": facts.device_count}
        found.append(
            Problem("--ranks", facts.local_ranks, "must be <= the number of GPUs", because, (facts.device_count,))
        )
    no_gpu = c.device == "cpu" or facts.device_count == 0  # a plan on a laptop is for machines that have them
    if c.kernels == "triton" and (no_gpu or not facts.triton_ok):
        device = {"device": "CPU" if no_gpu else f"{facts.device_name}, where triton does not run or is not installed"}
        rule = "Triton kernels need an NVIDIA GPU of compute capability 8.0 and the triton package"
        found.append(problem("train", c, "kernels", rule, device, ("auto", "plain")))
    if c.cuda_graphs == "on" and no_gpu:
        found.append(problem("train", c, "cuda_graphs", "needs an NVIDIA GPU", {"device": "CPU"}, ("auto", "off")))
    if c.kernels == "optional":
        found += check_optional_kernels(run, facts, no_gpu)
    known = switches() if c.plain_ops else ()
    unknown = [op for op in c.plain_ops if op not in known]
    if unknown:
        rule = f"must name ops among {', '.join(known)}"
        valid = list(dict.fromkeys(name for op in c.plain_ops for name in near(op, known)[:1]))
        found.append(problem("train", c, "plain_ops", rule, {"unknown": ", ".join(unknown)}, (valid,)))
    able = {"bf16": facts.bf16_ok, "fp16": facts.fp16_ok}
    if not able.get(c.precision, True):
        others = tuple(name for name in ("bf16", "fp16", "fp32") if able.get(name, True))
        found.append(
            problem("train", c, "precision", "must be a dtype of the device", {"device": facts.device_name}, others)
        )
    return found


def check_optional_kernels(run: Run, facts: Facts, no_gpu: bool) -> list[Problem]:
    """Kernels of optional packages, asked for by name: they are here, run on this device, and have this run's dtype
    and shapes."""
    c, others = run.train, ("auto", "triton")
    absent = {op: why for op, why in facts.no_optional_kernels if op not in c.plain_ops}
    if no_gpu or absent:
        rule = f"optional kernels need an NVIDIA GPU of compute capability 9.0 and their packages: {EXTRA}"
        device = {"device": "CPU" if no_gpu else facts.device_name, **({} if no_gpu else absent)}
        return [problem("train", c, "kernels", rule, device, others)]
    unfit = {
        name: value
        for op, names in unfit_for_optional_kernels(run).items()
        if op not in c.plain_ops
        for name, value in names.items()
    }
    if not unfit:
        return []
    rule = "optional kernels must have the dtype and the shapes of the run (or their op must be in train.plain_ops)"
    return [problem("train", c, "kernels", rule, unfit, others)]


def unfit_for_optional_kernels(run: Run) -> dict[str, dict[str, Any]]:
    """By op of the model that has a kernel from an optional package, what that kernel cannot do in this run."""
    c, m, tp = run.train, run.model, run.layout.tp
    inner, gated, dropout = (
        m.intermediate_size or 0,
        m.gated_mlp and not m.routed_experts,
        getattr(m, "attention_dropout", 0.0),
    )
    query, value = m.head_widths
    dtype = {"train.precision": c.precision} if c.precision not in ("bf16", "fp16") else {}
    attention = {
        **(
            {} if flash_fits(query, value) else {"width of a head": query if query == value else f"{query} and {value}"}
        ),
        **({"model.attention_dropout": dropout} if dropout else {}),
    }
    if not gated:
        return {"attention": {**dtype, **attention}}
    fits = inner % tp == 0 and gated_mlp_fits(m.hidden_size, inner // tp)
    mlp = {} if fits else {"model.hidden_size": m.hidden_size, "model.intermediate_size": inner, "layout.tp": tp}
    return {"attention": {**dtype, **attention}, "mlp": {**dtype, **mlp}}
