"""Ops whose fastest implementations come in optional packages: which packages, which versions were tested,
and whether they run here.

The packages are young and their interfaces move, so `auto` takes the tested versions alone, and nothing ever
requires them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from phalanx.ops.op import Kernels

CAPABILITY = (9, 0)  # Hopper and newer: what their kernels are written for
EXTRA = "pip install 'phalanx[kernels]'"


@dataclass(frozen=True)
class OptionalPackage:
    """A package with the twin of an op. `version` is the one that was tested; `module` is imported when the op first
    runs."""

    package: str
    version: str
    module: str


PACKAGES = {
    "attention": OptionalPackage("flash-attn-4", "4.0.0b36", "flash_attn.cute.interface"),
    "mlp": OptionalPackage("quack-kernels", "0.6.5", "quack.gemm_interface"),
}


@cache
def absent(op: str) -> str | None:
    """Why the package of an op cannot be used, as far as can be told without importing it; None: it is here."""
    package = PACKAGES[op]
    try:
        found = importlib.metadata.version(package.package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package.package} {package.version} is not installed"
    return None if found == package.version else f"{package.package} {found} is installed, tested is {package.version}"


def incapable(capability: tuple[int, int], nvidia: bool = True) -> str | None:
    """Why a GPU cannot run them; None: it can."""
    if not nvidia:
        return "not an NVIDIA GPU"
    return (
        None
        if capability >= CAPABILITY
        else f"compute capability {capability[0]}.{capability[1]}, 9.0 or newer is needed"
    )


@cache
def unusable(op: str, index: int = 0) -> str | None:
    """Why the twin of an op does not run on GPU number `index`; None: it does. Imports the package if all else is
    well."""
    why = incapable(torch.cuda.get_device_capability(index), torch.version.hip is None) or absent(op)
    if why is None:
        try:
            importlib.import_module(PACKAGES[op].module)
        except Exception as error:  # a package that lies there broken (another CUDA, another Python) is as good as none
            why = f"{PACKAGES[op].package} cannot be imported: {type(error).__name__}: {error}"
    return why


def use_optional_kernel(op: str, kernels: Kernels, x: Tensor, fits: bool) -> bool:
    """Whether an op on `x` is to run the kernel of its optional package. `fits`: whether that kernel takes this shape.

    `auto`: where it can run. `optional`: always; what cannot run was refused before the run began (config/check.py).
    """
    if kernels == "auto":
        return (
            fits
            and x.is_cuda
            and x.dtype in (torch.bfloat16, torch.float16)
            and unusable(op, x.device.index or 0) is None
        )
    return kernels == "optional"
