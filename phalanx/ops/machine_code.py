"""Kernels that ptxas miscompiled are refused before they are loaded.

On Hopper the matmuls of groups of warps (wgmma) find their tiles in shared memory by descriptors of 64 bits in uniform
registers, of which a program has 63. Where they run out, ptxas computes a descriptor anew from its base, and that of
CUDA 12.8, which comes with Triton 3.6 and 3.7, at times takes the stack pointer R1 for the base:

    IADD3 R24, P1, R1, 0x2, RZ
    IADD3.X R25, R1, -0x7fffffe0, RZ, P1, !PT
    R2UR UR46, R24
    R2UR UR47, R25
    HGMMA.64x32x8.F32.TF32 R72, R108, gdesc[UR44], R72

The matmul then reads a wild address, and the process ends with "illegal memory access". No comparison with a reference
(phalanx.ops.proof) survives that, so the machine code of each kernel with such matmuls is searched before Triton loads
it. What was found is kept beside it in Triton's cache. Where nvdisasm is missing, which Triton brings, and on AMD GPUs
nothing is searched.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any

from phalanx.base.errors import PhalanxError

SEARCH = "search 1"  # the first line of what is kept: count up where something else is searched for
STACK = "R1"
INSTRUCTION = re.compile(r"^ *(?:/\*\w+\*/ *)?(@\S+ +)?([A-Z][\w.]*) +([^;]*?) *;", re.MULTILINE)
REGISTER = re.compile(r"\bR\d+\b")


class MiscompiledKernel(PhalanxError):
    """A Triton kernel whose machine code would end the process."""

    exit_code = 2


def watch() -> None:
    """From now on Triton calls `refuse` before it loads a kernel. To say it twice changes nothing."""
    from triton import knobs  # optional package

    knobs.runtime.kernel_load_start_hook.add(refuse)


def refuse(module: Any, function: Any, name: str, files: Mapping[str, str], digest: str) -> None:
    """A hook of Triton's: MiscompiledKernel if the kernel would end the process. Triton calls it before each launch of
    a kernel until it is loaded, so one that was refused is refused again. files: as of `wrong_in`."""
    found = wrong_in(files)
    if not found:
        return
    ptxas, other = tool("ptxas"), tool("ptxas_blackwell")
    which = f"ptxas {ptxas.version}" if ptxas else "ptxas"
    do = "Name its op in train.plain_ops, or use another Triton"
    if ptxas and other and other.version != ptxas.version:
        do = f"Name its op in train.plain_ops, or set TRITON_PTXAS_PATH={other.path} (ptxas {other.version})"
    raise MiscompiledKernel(
        f"{name} was miscompiled by {which}: it reads a wild address in shared memory, which would end the "
        f"process. {do}. Its machine code takes the stack pointer for a tile's address: {found}"
    )


def wrong_in(files: Mapping[str, str]) -> str:
    """The first wrong instruction of a compiled kernel; "": none is known. files: the paths of its files in Triton's
    cache, by name."""
    paths = {path.suffix: path for path in map(Path, files.values())}
    cubin = paths.get(".cubin")
    if cubin is None:
        return ""
    kept = cubin.with_suffix(".searched")
    found = read(kept)
    if found is None and multiplies_in_groups(paths.get(".ptx")):
        found = stack_in_descriptor_of(cubin)
        if found is not None:
            keep(kept, found)
    return found or ""


def multiplies_in_groups(ptx: Path | None) -> bool:
    """Whether a kernel has matmuls of groups of warps, as far as is known."""
    try:
        return ptx is None or b"wgmma" in ptx.read_bytes()
    except OSError:
        return True


def stack_in_descriptor_of(cubin: Path) -> str | None:
    """The same as `stack_in_descriptor`, of a compiled kernel; None: it cannot be disassembled here."""
    nvdisasm = tool("nvdisasm")
    if nvdisasm is None:
        return None
    try:
        done = subprocess.run([nvdisasm.path, "-c", cubin], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return stack_in_descriptor(done.stdout)


def stack_in_descriptor(code: str) -> str:
    """Of disassembled code, the first instruction that computes with the stack pointer what is later moved to a uniform
    register; "": there is none. Right code addresses local memory with it, as in [R1+0x10], and computes addresses of
    arrays on the stack (libdevice's sine, device_print), which stay in the registers of threads."""
    come = {STACK: ""}  # registers whose value comes from the stack pointer, and the instruction where it began
    for condition, name, given in INSTRUCTION.findall(code):
        into, *operands = re.sub(r"\[.*?\]", "", given).split(", ")
        if re.match(r"U?P", into) and operands:  # a predicate is written, and a register perhaps
            into, *operands = operands
        began = [come[x] or f"{name} {given}" for x in REGISTER.findall(" ".join(operands)) if x in come]
        if began and name.startswith("R2UR"):
            return began[0]
        if into == STACK or not REGISTER.fullmatch(into):
            continue
        if began:
            come[into] = began[0]
        elif not condition:
            for number in range(width(name)):
                come.pop(f"R{int(into[1:]) + number}", None)
    return ""


def width(name: str) -> int:
    """How many registers an instruction writes, at least."""
    if ".128" in name:
        return 4
    return 2 if ".64" in name or "WIDE" in name else 1


def tool(name: str) -> Any:
    """One of NVIDIA's tools that Triton uses, with its path and version; None: it is not there."""
    from triton import knobs  # optional package

    try:
        return getattr(knobs.nvidia, name, None)
    except RuntimeError:  # not found
        return None


# ---- what was found


def read(kept: Path) -> str | None:
    """What an earlier search found; None: there was none, or another one."""
    try:
        search, _, found = kept.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    return found if search == SEARCH else None


def keep(kept: Path, found: str) -> None:
    """Written as a whole, so that another process never reads half of it. In a folder that cannot be written to it is
    lost, and searched for once more."""
    part = kept.with_name(f"{kept.name}.{os.getpid()}.{get_ident()}")
    with suppress(OSError):
        part.write_text(f"{SEARCH}\n{found}", encoding="utf-8")
        part.replace(kept)
