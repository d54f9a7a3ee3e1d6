"""doctor: what this machine has, which implementation of each op runs on it and why, and what is missing. Uses no
network and runs nothing on the GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil

import torch
from torch.nn.attention import SDPBackend

from phalanx.base.devices import find_device
from phalanx.base.version import VERSION
from phalanx.ops import proof
from phalanx.ops.op import EXTRA, has_triton, packaged, runs_triton, table, unusable
from phalanx.ops.quantized import cublaslt

Rows = list[tuple[str, str]]

OPTIONAL = {
    "triton": "fast implementations of norm, SwiGLU, RoPE, loss and AdamW on a GPU",
    "flash-attn-4": f"attention by its kernels ({EXTRA})",
    "quack-kernels": f"SwiGLU inside the GEMMs ({EXTRA})",
    "lm-eval": "phalanx eval --tasks (pip install 'phalanx[eval]')",
    "tensorboard": "log.tensorboard=true (pip install 'phalanx[tensorboard]')",
    "wandb": "log.wandb=PROJECT (pip install 'phalanx[wandb]')",
}


def report() -> str:
    """Text of at most 120 columns."""
    sections = {
        "Versions": versions(),
        "Devices": devices(),
        "This machine": machine(),
        "Which implementation of each op runs here": implementations(),
        "Ops that have more than their reference (train.plain_ops takes one back to it)": ops(),
        "Kernels that differ from their reference here, and are not used": wrong_kernels(),
        "Fast paths": fast_paths(),
        "Optional packages": optional_packages(),
        "Look at these": warnings(),
    }
    return "\n\n".join(f"{title}\n{text_of(rows)}" for title, rows in sections.items() if rows)


def text_of(rows: Rows) -> str:
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"  {name:<{width}}{text}" for name, text in rows)


def versions() -> Rows:
    python = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    rows = [("phalanx", VERSION), ("python", python), ("torch", torch.__version__)]
    if torch.cuda.is_available():
        rows += [
            ("cuda", str(torch.version.cuda)),
            ("cudnn", str(torch.backends.cudnn.version())),
            ("nccl", ".".join(map(str, torch.cuda.nccl.version()))),
        ]
    return rows


def devices() -> Rows:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "torch sees none (driver, CUDA_VISIBLE_DEVICES)" if built else "torch was built without CUDA"
        return [("GPU", f"none: {why}; training runs on the CPU with gloo")]
    rows = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        known = find_device(p.name)
        peak = (
            f"{(known.bf16 or known.fp16 or known.fp32) / 1e12:g} TFLOP/s dense"
            if known
            else "peak unknown: no mfu is shown"
        )
        size = f"{p.total_memory / 2**30:.1f} GiB, {p.multi_processor_count} SMs"
        rows.append((f"GPU {i}", f"{p.name}, capability {p.major}.{p.minor}, {size}, {peak}"))
    return rows


def machine() -> Rows:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rows = [
        (
            "CPU",
            f"{usable_cores()} usable cores of {os.cpu_count()}, torch uses {torch.get_num_threads()} "
            "threads in one process",
        ),
        ("memory", f"{available_memory() / 2**30:.1f} GiB available"),
        ("open files", f"limit {soft:,} (may be raised to {hard:,})"),
    ]
    if os.path.isdir("/dev/shm"):
        rows.append(("shared memory", f"{shutil.disk_usage('/dev/shm').free / 2**30:.2f} GiB free in /dev/shm"))
    return rows


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes; on a system without /proc all of the memory."""
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo", encoding="ascii") as lines:
            kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kib.get("MemAvailable", kib.get("MemTotal", 0)) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def quantized_matmuls() -> str:
    return (
        "torch's; added to the fp32 buffer, and of blocks, by cuBLASLt"
        if cublaslt.library()
        else "torch's; cuBLASLt is not found"
    )


def implementations() -> Rows:
    """Follows the choices that the ops make (phalanx/ops); a choice that changes there changes here."""
    cuda = torch.cuda.is_available()
    return [
        ("communication", "NCCL, one rank per GPU" if cuda else "gloo, because there is no GPU"),
        ("attention", attention()),
        ("  with dropout", "explicit softmax: no fused kernel has our layout-independent mask"),
        (
            "weight gradients",
            f"addmm into the fp32 buffer, {'inside the GEMM' if cuda else 'operands widened first (CPU)'}",
        ),
        ("matmuls in 8 bits", quantized_matmuls() if cuda else "emulated, because there is no GPU"),
        ("norm, RoPE, SwiGLU", "Triton kernels" if triton_runs() else "PyTorch ops with hand-written backward"),
        ("cross entropy", "chunked over tokens, cut over the vocabulary; the full logits never exist"),
        (
            "AdamW",
            ("a Triton kernel" if triton_runs() else "torch's fused kernel")
            + " over flat buffers, step count and skips on the device",
        ),
    ]


def triton_runs() -> bool:
    """Whether train.kernels=auto takes the Triton implementations here."""
    return torch.cuda.is_available() and runs_triton(torch.device("cuda", torch.cuda.current_device()))


def ops() -> Rows:
    """Each op of the table with its implementations: which one auto chooses, or why it does not."""
    cuda, rows = torch.cuda.is_available(), []
    for op in table():
        said: dict[str, list[str]] = {}
        for made in op.implementations:
            why = ("no GPU" if made.device == "cuda" and not cuda else None) or unusable(made)
            said.setdefault(why or made.shapes or "runs", []).append(made.name)
        rows.append((op.name, "; ".join(f"{', '.join(names)} ({why})" for why, names in said.items())))
    return rows


def gpus() -> list[torch.device]:
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def wrong_kernels() -> Rows:
    """What earlier runs found on these GPUs (phalanx.ops.proof), by the file beside Triton's compiled kernels."""
    checks, rows = proof.checks(), Rows()
    for device in gpus() if checks is not None else ():
        refused = checks.refused(proof.setting_of(device))  # type: ignore[union-attr]
        rows += [(name, f"{device}: {why}; another tuning or the reference runs") for name, why in refused.items()]
    return rows


def fast_paths() -> Rows:
    """Each fast path: available, or why it is missing and what that costs (in words: figures are in
    benchmarks/results)."""
    cuda = torch.cuda.is_available()
    no_gpu = None if cuda else "no GPU"
    old = None if not cuda or torch.cuda.get_device_capability() >= (8, 0) else "compute capability below 8.0"
    why_triton = (
        no_gpu
        or old
        or (None if has_triton() else "no triton package")
        or (None if triton_runs() else "not an NVIDIA GPU")
    )
    why_cudnn = (
        no_gpu
        or old
        or (
            None
            if torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()
            else "torch lacks cuDNN"
        )
    )
    rows = [
        ("Triton kernels", why_triton, "norm, SwiGLU, RoPE, loss, AdamW are many operators, with memory in between"),
        ("cuDNN attention", why_cudnn, "attention takes another kernel of torch (the row above says which)"),
        ("bf16 matmuls", no_gpu or old, "train.precision=bf16 saves memory but no time"),
        ("NCCL", no_gpu, "ranks talk through gloo and main memory"),
    ]
    if cuda and torch.cuda.device_count() > 1:
        near = all(torch.cuda.can_device_access_peer(0, i) for i in range(1, torch.cuda.device_count()))
        rows.append(
            (
                "GPU to GPU",
                None if near else "no peer access",
                "messages go through main memory; tensor parallelism suffers most",
            )
        )
    for made in packaged().values():
        rows.append((made.package.name if made.package else "", no_gpu or unusable(made), made.cost))
    return [(name, "here" if why is None else f"missing ({why}): {cost}") for name, why, cost in rows]


def attention() -> str:
    """What torch chooses for bf16 heads of 128 in training."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.empty(1, 2, 256, 128, dtype=torch.bfloat16, device=device, requires_grad=True)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, True)).name.replace("_ATTENTION", "").lower()
    return f"torch scaled_dot_product_attention, {chosen} kernel (torch's choice for bf16, head_dim 128)"


def optional_packages() -> Rows:
    rows = []
    for name, use in OPTIONAL.items():
        try:
            rows.append((name, f"{importlib.metadata.version(name)}"))
        except importlib.metadata.PackageNotFoundError:
            rows.append((name, f"not installed; without it: no {use}"))
    return rows


def warnings() -> Rows:
    """What is likely to cause trouble."""
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        found.append(("open files", f"the limit of {soft:,} is low for many ranks and data files: ulimit -n 65536"))
    if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free < 2**30:
        found.append(
            (
                "shared memory",
                "less than 1 GiB free in /dev/shm: NCCL between the GPUs of a machine may fail (docker: --shm-size=8g)",
            )
        )
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        if free < 0.9 * total:
            found.append((f"GPU {i}", f"{(total - free) / 2**30:.1f} GiB are in use by others"))
    return found
