"""The kernels that state-space models and linear attention are trained with today: mamba-ssm's Triton part, and
flash-linear-attention's. Neither is installed: their published archives are unpacked for the life of the process.

mamba-ssm 2.3.2.post1 comes as an archive of sources (0.2 MB) whose installation compiles CUDA; the Triton part alone is
importable without it. fla-core 0.6.0 is a wheel (1.1 MB). Both need einops.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import sys
import tarfile
import tempfile
import types
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ARCHIVES = Path(os.environ.get("PEERS", Path(__file__).parents[2] / ".whl"))
"""Where mamba_ssm-*.tar.gz and fla_core-*.whl are."""


class Missing(Exception):
    """A peer cannot be used here, and why."""


@cache
def unpacked() -> Path:
    """A folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="peers-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def archive(pattern: str) -> Path:
    found = sorted(ARCHIVES.glob(pattern))
    if not found:
        raise Missing(f"no {pattern} in {ARCHIVES}")
    return found[-1]


def imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # of a package that is not ours, for whatever reason
        raise Missing(f"{module} cannot be imported: {type(error).__name__}: {error}"[:300]) from error


@cache
def mamba() -> tuple[str, Callable[[str], Any]]:
    """mamba-ssm's version, and its modules by name. Its top-level module, which imports the CUDA part, is not run."""
    path = archive("mamba_ssm-*.tar.gz")
    with tarfile.open(path) as file:
        file.extractall(unpacked(), filter="data")
    package = types.ModuleType("mamba_ssm")
    package.__path__ = [str(unpacked() / path.name.removesuffix(".tar.gz") / "mamba_ssm")]
    sys.modules["mamba_ssm"] = package
    return path.name.removesuffix(".tar.gz").replace("_", "-"), lambda name: imported(f"mamba_ssm.{name}")


@cache
def fla() -> tuple[str, Callable[[str], Any]]:
    """The same of flash-linear-attention."""
    path = archive("fla_core-*.whl")
    with zipfile.ZipFile(path) as file:
        file.extractall(unpacked() / "fla")
    sys.path.insert(0, str(unpacked() / "fla"))
    return "-".join(path.name.split("-")[:2]).replace("_", "-"), lambda name: imported(f"fla.{name}")


# ---- their functions, as ours are called


class Steps(NamedTuple):
    """x (R, L, H, P), dt (R, L, H), a (H,), b and c (R, L, G, N), d (H,), as in ours. bias (H,): dt is softplus of
    itself and this, within limits; None: it is a step already."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    bias: Tensor | None = None
    limits: tuple[float, float] = (0.0, float("inf"))


def mamba_scan(s: Steps, chunk: int) -> Tensor:
    module = mamba()[1]("ops.triton.ssd_combined")
    how = {"D": s.d, "dt_bias": s.bias, "dt_softplus": s.bias is not None, "dt_limit": s.limits}
    return module.mamba_chunk_scan_combined(s.x, s.dt, s.a, s.b, s.c, chunk, **how)  # type: ignore[no-any-return]


def mamba_step(s: Steps, states: Tensor) -> Tensor:
    """One token of each sequence, states (S, H, P, N) in place: x (S, H, P), dt (S, H), b and c (S, G, N), bias as
    above. Its fast form reads a, dt, bias and d of a head once, which it knows from strides of 0."""
    module = mamba()[1]("ops.triton.selective_state_update")
    width, state = states.shape[-2:]
    spread = [None if t is None else t.unsqueeze(-1).expand(*t.shape, width) for t in (s.dt, s.d, s.bias)]
    a = s.a[:, None, None].expand(-1, width, state)
    made = module.selective_state_update(states, s.x, spread[0], a, s.b, s.c, spread[1], None, spread[2], True)
    return made  # type: ignore[no-any-return]


def mamba_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    module = mamba()[1]("ops.triton.layernorm_gated")
    size = x.shape[-1] // groups
    made = module.rmsnorm_fn(x, weight, None, z=gate, eps=eps, group_size=size, norm_before_gate=False)
    return made  # type: ignore[no-any-return]


def fla_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (R, L, C), weight (C, K): with silu."""
    module = fla()[1]("modules.causal_conv1d")
    return module.causal_conv1d(x, weight, bias, activation="silu", backend="triton")[0]  # type: ignore[no-any-return]


def fla_conv_step(x: Tensor, kept: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (S, C), kept (S, C, K) in place."""
    module = fla()[1]("modules.causal_conv1d")
    found = module.causal_conv1d_update(x, kept, None, weight, bias, "silu")
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


def fla_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """q and k (R, L, H, K), normalised here; v (R, L, HV, V); decay, a logarithm, and beta (R, L, HV).

    On Hopper with Triton from 3.4 to 3.7.0 its backward refuses to run, since its gradients were wrong there in tiles
    of 64 features (fla-org/flash-linear-attention#640). Its speed is wanted all the same: what it computes is compared
    with ours, and the difference is in the table."""
    module = fla()[1]("ops.gated_delta_rule")
    fla()[1]("ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    made = module.chunk_gated_delta_rule(q, k, v, decay, beta, use_qk_l2norm_in_kernel=True)
    return made[0]  # type: ignore[no-any-return]


# ---- the same in plain torch, recurrences token by token: for CPUs


def plain_scan(s: Steps, _: int = 0) -> Tensor:
    each = s.x.shape[2] // s.b.shape[2]
    b, c = (t.repeat_interleave(each, 2) for t in (s.b, s.c))
    dt = s.dt if s.bias is None else F.softplus(s.dt + s.bias).clamp(*s.limits)
    state, made = s.x.new_zeros(len(s.x), *s.x.shape[2:], s.b.shape[-1]), []
    for t in range(s.x.shape[1]):
        step = (dt[:, t, :, None] * s.x[:, t]).unsqueeze(-1) * b[:, t].unsqueeze(2)
        state = (dt[:, t] * s.a).exp()[..., None, None] * state + step
        made.append(torch.einsum("rhpn,rhn->rhp", state, c[:, t]) + s.d[:, None] * s.x[:, t])
    return torch.stack(made, 1)


def plain_delta(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    each = v.shape[2] // k.shape[2]
    q, k = (F.normalize(t, dim=-1).repeat_interleave(each, 2) for t in (q, k))
    state, made = v.new_zeros(len(v), *v.shape[2:3], k.shape[-1], v.shape[-1]), []
    for t in range(v.shape[1]):
        state = decay[:, t].exp()[..., None, None] * state
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("rhk,rhkv->rhv", k[:, t], state))
        state = state + k[:, t].unsqueeze(-1) * u.unsqueeze(2)
        made.append(torch.einsum("rhk,rhkv->rhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return torch.stack(made, 1)


def plain_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    passed = (x * F.silu(gate)).unflatten(-1, (groups, -1))
    return (passed * torch.rsqrt(passed.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2) * weight


def plain_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padded = F.pad(x.mT, (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))).mT
