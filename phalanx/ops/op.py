"""Ops: what each computes, which implementations of it there are, where each runs, and the one way to choose one.

An op is declared once, in the file of its definition, and named in the registry (base.registry, seam "op"):

    NORM = Op(
        "norm",
        "RMSNorm and LayerNorm, with the residual addition before them",
        __name__,                                            the reference: this module has `norm_forward`, ...
        ("norm_forward", "norm_backward"),                   what every implementation has, with the same signatures
        (triton("phalanx.ops.dense.norm_kernel"),),          the others, the preferred one first
        cases=(Case("rms_norm", ...), ...),                  by which the tests compare them
    )

`NORM.choose(kernels, x)` is the module (or class) whose functions are to run. It is asked where the op is called, once
for forward and backward. `kernels` is train.kernels, or "plain" where train.plain_ops names the op (Env.kernels_for).
With train.batch_invariant it is "invariant": only implementations run that have it among their modes, which says that
the bits of a row of their forward depend on that row alone. An op without one that runs here is refused by name.

An implementation is a module, or a class of one. It is imported when it is first chosen: `*_kernel` modules import
triton. On the CPU they run in Triton's interpreter (TRITON_INTERPRET=1 before the first import), which is how the tests
compare them with the references. A package of one's own adds an op by `declare`, and an implementation of ours by
`implement`.

A forecast of memory runs modules on tensors without data (device "meta"), with the `kernels` of the run. Where a kernel
takes less memory than the reference, its op has an implementation "dry" beside it, which allocates what the kernel does
and computes nothing; other ops run their reference. Its modes are those in which the plan knows that the kernel runs:
of a kernel from an optional package `optional` alone, since with `auto` the machines of the run decide.

On a GPU a Triton implementation is used only after it gave the reference's outputs and gradients there, in the op's
small cases (phalanx.ops.proof). One with several tunings is a class that is made with one of them: the first that
passes. If none does, the next implementation runs, in the end the reference. Kernels whose machine code would end the
process are refused at their launch (phalanx.ops.machine_code).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError
from phalanx.base.registry import find, names, register, registered
from phalanx.ops import machine_code, proof

Kernels = Literal["auto", "plain", "triton", "optional", "invariant"]
"""What a caller asks for: a value of train.kernels, or, in a run with train.batch_invariant, `invariant`."""

SEAM, ADDED = "op", "implementation"
NO_FEATURES: frozenset[str] = frozenset()
ALL_KERNELS: tuple[Kernels, ...] = ("plain", "auto", "triton", "optional")
EXTRA = "pip install 'phalanx[kernels]'"
SLOWER = "the reference is many operators, with memory in between"
THREADS = 8  # that compare kernels: Python's share of compiling, a fifth, leaves no more to be gained


class NotInvariant(PhalanxError):
    """train.batch_invariant, and an op has no implementation here whose bits depend on the row alone."""

    exit_code = 2


class BadImplementation(PhalanxError):
    """An implementation of an op cannot be imported, or lacks a member that its reference has."""

    exit_code = 2


@dataclass(frozen=True)
class Package:
    """An optional package that an implementation needs.

    version  the tested version; no other is used. None: any
    module   the module that the kernel imports from it
    folder   it works only below a folder with one of these names (pip's --target may have any); none: anywhere
    """

    name: str
    module: str
    version: str | None = None
    folder: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Implementation:
    """One way to compute an op, and where it runs.

    source      `module` or `module:NAME`: where its functions are
    device      of the tensors; "any": all that torch has; "meta": tensors without data, of which memory is counted
    capability  the least compute capability of a GPU, which is then an NVIDIA one
    dtypes      of the first tensor; None: all
    fits        sizes of this call (as the op's caller passes them to `choose`) -> whether it supports them; None: all
    shapes      the same in words, for people
    features    of those that a call may ask for, the ones that it has; None: all
    modes       values of train.kernels under which it is taken where it runs; `invariant`: its rows are batch-invariant
    insisted    values of train.kernels under which it is taken unasked: a config that cannot have it was refused
    cost        what is slower without it, for people
    tunings     how it can be cut (block sizes, warps, stages), the preferred one first: `source` is then a class that
                is made with one of them. None: it has one way for each shape
    checked     whether it is used on a GPU only after it equalled the reference there
    """

    name: str
    source: str
    device: Literal["cuda", "cpu", "meta", "any"] = "any"
    capability: tuple[int, int] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    package: Package | None = None
    fits: Callable[..., bool] | None = None
    shapes: str = ""
    features: frozenset[str] | None = None
    modes: tuple[Kernels, ...] = ("auto", "triton", "optional")
    insisted: tuple[Kernels, ...] = ()
    cost: str = ""
    tunings: tuple[Any, ...] = ()
    checked: bool = False

    def takes(self, kernels: Kernels, x: Tensor, sizes: tuple[Any, ...], asked: frozenset[str] = NO_FEATURES) -> bool:
        """Whether it is to run on `x`, and has the features that are asked for."""
        if not self.has(asked) or (x.is_meta and self.device not in ("meta", "any")):
            return False
        if kernels in self.insisted:
            return True
        return kernels in self.modes and self.runs_on(x) and (self.fits is None or self.fits(*sizes))

    def has(self, asked: frozenset[str]) -> bool:
        """Whether it has the features that are asked for."""
        return self.features is None or asked <= self.features

    def runs_on(self, x: Tensor) -> bool:
        """Whether it runs on the device of `x` and has its dtype."""
        if self.device not in ("any", x.device.type):
            return False
        return (self.dtypes is None or x.dtype in self.dtypes) and unusable(self, x.device.index or 0) is None

    def incapable(self, capability: tuple[int, int], nvidia: bool = True) -> str | None:
        """Why a GPU cannot run it; None if it can."""
        if self.capability is None or (nvidia and capability >= self.capability):
            return None
        has, least = ".".join(map(str, capability)), ".".join(map(str, self.capability))
        return f"compute capability {has}, {least} or newer is needed" if nvidia else "not an NVIDIA GPU"

    def load(self) -> Any:
        """The module or class that holds its functions."""
        return load(self.source)

    @property
    def where(self) -> str:
        """Where it runs, in words."""
        device = {"cuda": "GPUs", "cpu": "CPUs", "meta": "tensors without data", "any": "everywhere"}[self.device]
        least = " of compute capability {}.{} and newer".format(*self.capability) if self.capability else ""
        tested = self.package is not None and self.package.version is not None
        package = f"{self.package.name} {self.package.version}" if self.package and tested else ""
        dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes or ())
        return "; ".join(part for part in (device + least, package, dtypes, self.shapes) if part)


def triton(source: str, invariant: bool = False, **fields: Any) -> Implementation:
    """A Triton implementation: runs on NVIDIA GPUs of compute capability 8.0 and newer, and in Triton's interpreter
    where train.kernels insists on it. invariant: the bits of a row depend on that row alone."""
    package = Package("triton", "triton")
    insisted: tuple[Kernels, ...] = ("triton", "optional")
    modes: tuple[Kernels, ...] = ("auto", "invariant") if invariant else ("auto",)
    fields = {"dtypes": None, "package": package, "modes": modes, "insisted": insisted, "checked": True, **fields}
    return Implementation("triton", source, "cuda", (8, 0), **fields)


def invariant(source: str, device: Literal["cpu", "any"] = "cpu", **fields: Any) -> Implementation:
    """An implementation for train.batch_invariant alone. A reference may be one: on CPUs, torch's sums over the last
    dim take one order whatever the number of rows."""
    return Implementation("invariant", source, device, modes=("invariant",), **fields)


@cache
def load(source: str) -> Any:
    """The module at `module`, or its member at `module:NAME`."""
    module, _, name = source.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@cache
def absent(package: Package) -> str | None:
    """Why a package cannot be used, as far as is known without importing it; None if it is installed."""
    if package.version is None:
        return None if find_spec(package.module.partition(".")[0]) else f"{package.name} is not installed"
    try:
        installed = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{package.name} {package.version} is not installed"
    if installed.version != package.version:
        return f"{package.name} {installed.version} is installed, tested is {package.version}"
    place = Path(str(installed.locate_file("")))
    if package.folder and not {*package.folder} & {*place.parts}:
        return f"{package.name} is in {place}: it works only in a folder named {' or '.join(package.folder)}"
    return None


@cache
def unusable(made: Implementation, index: int = 0) -> str | None:
    """Why an implementation does not run here (on GPU number `index` if it is for GPUs); None if it does. As the last
    check, imports the package."""
    if made.capability is not None:
        why = made.incapable(torch.cuda.get_device_capability(index), torch.version.hip is None)
        if why is not None:
            return why
    if made.package is None:
        return None
    why = absent(made.package)
    if why is None and made.package.version is not None:
        try:
            importlib.import_module(made.package.module)
        except Exception as error:  # built for another CUDA or Python: the same as missing
            why = f"{made.package.name} cannot be imported: {type(error).__name__}: {error}"
    return why


@dataclass(frozen=True, eq=False)
class Case:
    """An example with which the tests compare implementations: the output, and the gradient of each input.

    call    (*inputs, kernels) -> a tensor, or several without gradients. Its inputs are drawn from a normal
            distribution
    shapes  of the inputs
    params  which inputs are parameters: their gradients are added to `.grad`, in at least fp32
    dtypes  of the inputs. The truth is the reference in float64 on the same values. None: the tests choose
    large   shapes of a real model: only for GPUs
    exact   the truth is the reference on the same values in their own dtype, to the bit: of quantized values
    asked   the features that it asks for: implementations that lack one are not compared
    """

    name: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    params: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] | None = None
    large: bool = False
    exact: bool = False
    asked: frozenset[str] = NO_FEATURES


@dataclass(frozen=True, eq=False)
class Op:
    """An op: what it computes, and what computes it.

    name             in the registry
    title            what it computes, for people
    definition       `module` or `module:NAME` of the definition in plain PyTorch, which runs everywhere
    members          what every implementation has: functions with the reference's signatures, sizes
    implementations  the others, the preferred one first
    switches         names in train.plain_ops that make it run its reference; empty: its own name
    """

    name: str
    title: str
    definition: str
    members: tuple[str, ...]
    implementations: tuple[Implementation, ...] = ()
    switches: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()

    @cached_property
    def reference(self) -> Any:
        return loaded(self, self.definition)

    @cached_property
    def candidates(self) -> tuple[Implementation, ...]:
        """All implementations but the reference: first those added later (`implement`), newest first, then its own."""
        added = [made for name, made in registered(ADDED).items() if name.startswith(f"{self.name}/")]
        return (*reversed(added), *self.implementations)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The same, or what `only` has put in their place."""
        return _ONLY.get().get(self, self.candidates)

    def choose(self, kernels: Kernels, x: Tensor, *sizes: Any, asked: frozenset[str] = NO_FEATURES) -> Any:
        """The implementation to run on `x`: the module or class that has the op's members, and the features that are
        asked for. NotInvariant if it is to be batch-invariant and there is none."""
        found = self.fast(kernels, x, *sizes, asked=asked)
        if found is None and kernels == "invariant":
            raise NotInvariant(self.lacks_invariance(x))
        return self.reference if found is None else found

    def lacks_invariance(self, x: Tensor) -> str:
        """What to say where none of its implementations runs on `x` batch-invariantly."""
        able = [f"{made.name} ({made.where})" for made in self.choices if "invariant" in made.modes]
        what = f"op {self.name} ({self.title}) has no batch-invariant implementation for {x.dtype} on {x.device.type}"
        return f"{what}; it has {', '.join(able) or 'none'}: set train.batch_invariant=false"

    def fast(self, kernels: Kernels, x: Tensor, *sizes: Any, asked: frozenset[str] = NO_FEATURES) -> Any:
        """The same, of the implementations that have the features asked for; None: the reference, if it has them."""
        for made in self.choices:
            if made.takes(kernels, x, sizes, asked):
                found = self.tuned(made, x)
                if found is not None:
                    return found
        return None

    def tuned(self, made: Implementation, x: Tensor) -> Any:
        """An implementation as it is to run on the device of `x`; None: it is wrong there, however it is tuned."""
        if made.checked and x.is_cuda:
            checked = first_right(self, made, x.device, x.dtype)
            if checked.number is None:
                warn_of_wrong(self, made, x.device, checked)
                return None
            return with_tuning(self, made.source, made.tunings[checked.number : checked.number + 1])
        return with_tuning(self, made.source, made.tunings[:1])

    def is_plain(self, plain_ops: Sequence[str]) -> bool:
        """Whether train.plain_ops makes it run its reference."""
        return bool(plain_ops) and any(name in plain_ops for name in self.switches or (self.name,))


@cache
def loaded(op: Op, source: str) -> Any:
    """The module or class at `source`. BadImplementation if it cannot be imported or lacks a member of the op."""
    try:
        found = load(source)
    except (ImportError, AttributeError) as error:
        raise BadImplementation(f"op {op.name}: {source} cannot be imported: {error}") from error
    lacking = [name for name in op.members if not hasattr(found, name)]
    if lacking:
        raise BadImplementation(f"op {op.name}: {source} has no {', no '.join(lacking)}; {op.definition} has them")
    if sys.modules.get("triton") is not None:  # imported by what was loaded, or before
        machine_code.watch()
    return found


@cache
def with_tuning(op: Op, source: str, tuning: tuple[Any, ...]) -> Any:
    """The module or class of an implementation; made with a tuning, if there is one."""
    found = loaded(op, source)
    return found(*tuning) if tuning else found


# ---- whether it is right on this device


_ONLY: ContextVar[Mapping[Op, tuple[Any, ...]]] = ContextVar("_ONLY", default=MappingProxyType({}))


@contextmanager
def only(op: Op, *made: Any) -> Iterator[None]:
    """Inside it an op has these implementations alone, in this thread; none: its reference."""
    before = _ONLY.set({**_ONLY.get(), op: made})
    try:
        yield
    finally:
        _ONLY.reset(before)


def title(op: Op, made: Implementation, number: int, dtype: torch.dtype) -> str:
    """Names a tuning of an implementation in messages and in the file of outcomes."""
    tuning = f" {made.tunings[number]}" if made.tunings else ""
    return f"{op.name}: {made.name}{tuning}, {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Checked:
    """The number of the first tuning with which an implementation is right on a device, 0 if it has none; None: there
    is no such, and why the last one is not used."""

    number: int | None
    why: str = ""


@cache
def first_right(op: Op, made: Implementation, device: torch.device, dtype: torch.dtype) -> Checked:
    """Tunings are compared with the reference until one is right; what is known from earlier runs is read."""
    checks, setting = proof.checks(), proof.setting_of(device)
    known = {} if checks is None else checks.read().get(setting, {})
    found, new = Checked(None), dict[str, str]()
    for number in range(max(1, len(made.tunings))):
        name = title(op, made, number, dtype)
        if name not in known:
            with proof.may_wait(device, name):
                new[name] = known[name] = why_wrong(op, made, number, device, dtype)
        if not known[name]:
            found = Checked(number)
            break
        found = Checked(None, known[name])
    if new and checks is not None:
        checks.add(setting, new)
    return found


@cache
def warn_of_wrong(op: Op, made: Implementation, device: torch.device, checked: Checked) -> None:
    """Once, where ranks have not decided together what to do without an implementation (engine.agree): generation."""
    what = f"op {op.name} runs without its kernel, which differs from its reference on {device} ({checked.why})"
    warnings.warn(f"{what}; it costs time: {made.cost or SLOWER}", stacklevel=2)


def refused(ops: Sequence[Op], device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The ops with an implementation that is not used on a GPU because it is wrong there, and why. Ops are compared in
    threads, since most of it is compiling."""
    x = torch.empty(0, dtype=dtype, device=device)
    pairs = [(op, made) for op in ops for made in op.choices if made.checked and made.runs_on(x)]

    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index

    def compare(pair: tuple[Op, Implementation]) -> Checked:
        if device.type == "cuda":
            torch.cuda.set_device(index)  # each thread has its own
        with torch.autograd.set_multithreading_enabled(False):  # backward of all would otherwise wait in one thread
            return first_right(*pair, device, dtype)

    threads = min(len(pairs), THREADS, os.cpu_count() or 1)
    with proof.may_wait(device, "kernels"), ThreadPoolExecutor(max(1, threads)) as pool:
        found = zip(pairs, pool.map(compare, pairs))
        return {op.name: f"{made.name}: {checked.why}" for (op, made), checked in found if checked.number is None}


def why_wrong(op: Op, made: Implementation, number: int, device: torch.device, dtype: torch.dtype) -> str:
    """How an implementation with a tuning differs from the reference on a device, in the op's small cases; "": it does
    not. dtype: of the call; where no case has it, they are compared in their own."""
    tuning = made.tunings[number : number + 1]
    trial = replace(made, checked=False, tunings=tuning)
    kernels = "triton" if device.type == "cpu" else "auto" if "auto" in made.modes else made.modes[0]
    for case in compared_cases(op, made, dtype):
        kind = dtype_of(case, dtype)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                with only(op, trial):
                    found = proof.run_case(case, kind, kernels, device=device)
                with only(op):
                    truth = reference_of(case, kind, found, device)
        except torch.OutOfMemoryError:  # says nothing of the kernel
            raise
        except Exception as error:  # raised by compilers, drivers, and code that is not ours
            return proof.said(error)
        why = proof.difference(case, found, truth, kind)
        if why:
            return why
    return ""


def compared_cases(op: Op, made: Implementation, dtype: torch.dtype) -> list[Case]:
    """The small cases that have this dtype, which a run with it will compile kernels of; if none has, all."""
    small = [case for case in op.cases if not case.large and made.has(case.asked)]
    return [case for case in small if dtype_of(case, dtype) == dtype] or small


def dtype_of(case: Case, wanted: torch.dtype) -> torch.dtype:
    """The dtype in which a case is compared: the one that is wanted, or the first of its own. A case that takes fp16
    takes bf16 too, though Triton's interpreter cannot."""
    own = case.dtypes or (wanted,)
    return wanted if wanted in own or (wanted == torch.bfloat16 and torch.float16 in own and not case.exact) else own[0]


def reference_of(case: Case, dtype: torch.dtype, found: list[Tensor], device: torch.device) -> list[Tensor]:
    """What a case's results are: in float64, or on the CPU in the same dtype where they are compared to the bit. The op
    must have its reference alone."""
    if case.exact:
        return proof.run_case(case, dtype, "plain")
    return proof.run_case(case, dtype, "plain", exact=True, upstream=found[0].dtype, device=device)


def declare(op: Op) -> Op:
    """Add an op of a package of your own to the table."""
    register(SEAM, op.name, op, op.definition)
    return op


def implement(op: Op, made: Implementation) -> Implementation:
    """Add an implementation to an op that is declared elsewhere. It is preferred to the op's own."""
    register(ADDED, f"{op.name}/{made.name}", made, made.source)
    op.__dict__.pop("candidates", None)
    return made


def table() -> tuple[Op, ...]:
    """All ops: ours, those declared by modules imported so far, and those of installed packages (entry points
    `phalanx.op`)."""
    return tuple(find(SEAM, name, Op) for name in names(SEAM))


def rows() -> list[tuple[str, str, str, str]]:
    """For people: each op, what it computes, its implementations besides the reference and where they run, and its name
    in train.plain_ops."""
    found = [("op", "computes", "implementations beside the reference", "in train.plain_ops")]
    for op in table():
        made = ". ".join(f"{made.name}: {made.where}" for made in op.implementations)
        found.append((op.name, op.title, made, " or ".join(op.switches or (op.name,))))
    return found


def switches() -> tuple[str, ...]:
    """The names that train.plain_ops accepts."""
    return tuple(dict.fromkeys(name for op in table() for name in op.switches or (op.name,)))


def packaged() -> dict[str, Implementation]:
    """By op, the implementation of it that comes in an optional package of a tested version. Ops that
    train.plain_ops names together count as one, the first."""
    found: dict[str, Implementation] = {}
    for op in table():
        for made in op.implementations:
            if made.package is not None and made.package.version is not None:
                found.setdefault((op.switches or (op.name,))[0], made)
    return found


def has_triton() -> bool:
    return TRITON.package is not None and absent(TRITON.package) is None


def runs_triton(device: torch.device) -> bool:
    """Whether train.kernels=auto uses Triton implementations on a device."""
    return device.type == "cuda" and unusable(TRITON, device.index or 0) is None


TRITON = triton("triton")
"""Where Triton runs, whatever the kernel."""
