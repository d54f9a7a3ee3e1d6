"""Kernels that prove themselves: how an implementation of an op is compared with its reference on the device on which
it is to run, and the file in which the outcome is kept.

Compilers miscompile: with some versions of Triton, some tunings (block sizes, warps, stages) of correct kernels give
wrong gradients on some GPUs, without a word. So phalanx.ops.op uses a tuning on a device only after the outputs and
gradients of the op's small cases, odd shapes among them, were those of the reference in float64 there. The outcome is
kept beside Triton's compiled kernels, by device, versions and source: later runs read a line of a file. What ran and
differed, or did not run at all, is not used, and `phalanx doctor` lists it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass

FILE = "phalanx-checks.json"
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Largest difference, relative to the largest value of the truth. Of narrower types it is NARROW roundings. Wrong code
is wrong by far more; the tests, which look for mistakes of ours, are stricter."""
NARROW = 8


class CaseLike(Protocol):
    """phalanx.ops.op.Case."""

    @property
    def name(self) -> str: ...
    @property
    def call(self) -> Callable[..., Tensor | tuple[Tensor, ...]]: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def params(self) -> tuple[int, ...]: ...
    @property
    def exact(self) -> bool: ...


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values on the CPU, the same for any dtype but for its rounding."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run_case(
    case: CaseLike,
    dtype: torch.dtype,
    kernels: str,
    exact: bool = False,
    upstream: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> list[Tensor]:
    """Output and gradients of a case with inputs of `dtype`. `exact`: the same values in float64. `upstream`: the dtype
    that the gradient from above is rounded to; None: the output's."""
    kind = torch.float64 if exact else dtype
    inputs = [normal(*s, seed=i + 1, dtype=dtype).to(device).to(kind) for i, s in enumerate(case.shapes)]
    inputs = [x.requires_grad_() for x in inputs]
    for i in case.params:
        inputs[i].grad_dtype = torch.float64 if kind == torch.float64 else torch.float32
        inputs[i].grad = torch.ones(case.shapes[i], dtype=inputs[i].grad_dtype, device=device)
    y = case.call(*inputs, kernels)
    if isinstance(y, tuple):
        return list(y)
    if not y.requires_grad:
        return [y]
    y.backward(normal(*y.shape, seed=99, dtype=upstream or y.dtype).to(device).to(y.dtype))
    return [y.detach(), *(x.grad for x in inputs if x.grad is not None)]


def difference(case: CaseLike, found: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> str:
    """How what was found differs from the truth by more than rounding, for people; "": it does not."""
    if len(found) != len(truth):
        return f"{case.name}: {len(found)} outputs and gradients instead of {len(truth)}"
    bound = BOUNDS.get(dtype, NARROW * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0
    for number, (a, b) in enumerate(zip(found, truth)):
        what = f"{case.name}: output" if number == 0 else f"{case.name}: result {number}"
        a, b = a.cpu(), b.cpu()
        if a.shape != b.shape:
            return f"{what} has shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        if case.exact:
            if a.dtype != b.dtype or not torch.equal(a, b):
                return f"{what} is not equal to the bit"
            continue
        largest = float(b.double().abs().max()) if b.numel() else 0.0
        off = float((a.double() - b.double()).abs().max()) if b.numel() else 0.0
        if not off <= bound * largest:  # NaN is not
            share = off / largest if largest else float("inf")
            return f"{what} differs by {share:.2g} of the largest value, rounding is {bound:.2g}"
    return ""


@contextmanager
def may_wait(device: torch.device, name: str) -> Iterator[None]:
    """Inside it the host may wait for a GPU, though the caller forbade it (torch.cuda.set_sync_debug_mode): a
    comparison does, once. While a CUDA graph is captured it cannot be made: RuntimeError."""
    if device.type != "cuda":
        yield
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{name}: not compared with its reference before a CUDA graph was captured")
    forbidden = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(forbidden)


# ---- the file


@dataclass(frozen=True)
class Checks:
    """The outcomes in a file: for each setting (device, versions, source), by name "" or why it is not used."""

    path: Path

    def read(self) -> dict[str, dict[str, str]]:
        """Nothing, if there is no file or it is damaged: everything is then checked anew."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(at): {str(k): str(v) for k, v in names.items()} for at, names in found.items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def add(self, setting: str, outcomes: Mapping[str, str]) -> None:
        """Replaced as a whole, so that another process never reads half a file, and by one process at a time. In a
        folder that cannot be written to, or has no locks, they may be lost; they are then compared once more."""
        part = self.path.with_name(f"{FILE}.{os.getpid()}")
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_name(f"{FILE}.lock").open("a") as lock:
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)
                found = self.read()
                found[setting] = {**found.get(setting, {}), **outcomes}
                try:
                    part.write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")
                    part.replace(self.path)
                finally:
                    part.unlink(missing_ok=True)

    def refused(self, setting: str) -> dict[str, str]:
        """What was not used under this setting, and why."""
        return {name: why for name, why in self.read().get(setting, {}).items() if why}


def checks() -> Checks | None:
    """Those beside Triton's compiled kernels; None without Triton."""
    if find_spec("triton") is None:
        return None
    from triton import knobs  # optional package

    return Checks(Path(knobs.cache.dir) / FILE)


@cache
def setting_of(device: torch.device) -> str:
    """What an outcome depends on beside the op: device, versions, and the source of all ops."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    capability = ".".join(map(str, torch.cuda.get_device_capability(device))) if device.type == "cuda" else ""
    return f"{name} {capability}, triton {_triton()}, torch {torch.__version__}, ops {_source()}"


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


@cache
def _source() -> str:
    """A digest of the source of all ops, since kernels share functions."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def said(error: Exception) -> str:
    """Of an implementation that did not run."""
    lines: Any = str(error).splitlines() or [""]
    return f"does not run: {type(error).__name__}: {lines[0][:200]}"
