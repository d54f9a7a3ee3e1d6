"""Kernels that ptxas miscompiled are known by their machine code and refused, others are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton import knobs

from phalanx.ops.machine_code import SEARCH, keep, read, stack_in_descriptor, stack_in_descriptor_of, wrong_in

WRONG = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0060*/                   VIADD R1, R1, 0xfffffdf0 ;
        /*4450*/                   HGMMA.64x32x8.F32.TF32 R72, R104, gdesc[UR56], RZ, !UPT ;
        /*4460*/                   IADD3 R24, P1, R1, 0x2, RZ ;
        /*4470*/                   IADD3.X R25, R1, -0x7fffffe0, RZ, P1, !PT ;
        /*44a0*/                   R2UR UR46, R24 ;
        /*44b0*/                   R2UR UR47, R25 ;
        /*44f0*/                   HGMMA.64x32x8.F32.TF32 R72, R108, gdesc[UR44], R72 ;
"""
SPILLED = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0060*/                   VIADD R1, R1, 0xfffffdf0 ;
        /*0100*/                   STL.64 [R1+0x140], R8 ;
        /*0110*/               @P0 LDL R24, [R1+0x10] ;
        /*0120*/                   R2UR UR46, R24 ;
"""
ARRAY = """
        /*0100*/                   MOV R38, R1 ;
        /*0110*/                   IADD3 R39, R38, 0x4, RZ ;
        /*0120*/                   STL [R39], R6 ;
        /*0130*/                   IADD3 R24, R1, -R40, RZ ;
        /*0140*/              @!P0 LDL R34, [R24+0x14] ;
        /*0150*/                   IMAD.IADD R47, R1, 0x1, -R40 ;
        /*0160*/                   LDS.128 R44, [R3] ;
        /*0170*/                   SHFL.IDX PT, R24, R0, RZ, 0x1f ;
        /*0180*/                   LDC.64 R38, c[0x0][0x230] ;
        /*0190*/                   R2UR UR4, R24 ;
        /*01a0*/                   R2UR UR6, R38 ;
        /*01b0*/                   R2UR UR7, R39 ;
        /*01c0*/                   R2UR UR8, R47 ;
"""
PRINTED = """
        /*0100*/                   ULDC.64 UR4, c[0x0][0x20] ;
        /*0110*/                   IADD3 R6, P6, R1, UR4, RZ ;
        /*0120*/                   IADD3 R8, P0, R1, c[0x0][0x20], RZ ;
        /*0130*/                   IADD3.X R7, RZ, UR5, RZ, P6, !PT ;
        /*0140*/                   CALL.ABS.NOINC R14 ;
"""


@pytest.mark.parametrize(
    "code, first",
    [
        (WRONG, "IADD3 R24, P1, R1, 0x2, RZ"),
        (WRONG.replace("R24, P1, R1, 0x2", "R24, P1, R22, 0x2"), "IADD3.X R25, R1, -0x7fffffe0, RZ, P1, !PT"),
        ("R2UR UR46, R1.reuse ;", "R2UR UR46, R1.reuse"),
        ("VIADD R24, R1, 0x2 ;\nIADD3 R26, P1, R24.reuse, 0x7e, RZ ;\nR2UR UR42, R26 ;", "VIADD R24, R1, 0x2"),
        ("@P0 VIADD R24, R1, 0x2 ;\n@!P0 MOV R24, R5 ;\nR2UR UR42, R24 ;", "VIADD R24, R1, 0x2"),
        (WRONG.replace("R1, 0x2", "R22, 0x2").replace("R25, R1", "R25, R23"), ""),
        (SPILLED, ""),
        (ARRAY, ""),
        (PRINTED, ""),
        ("", ""),
    ],
)
def test_the_stack_pointer_in_a_descriptor_is_found(code, first):
    """And not where it is an address of local memory."""
    assert stack_in_descriptor(code) == first


def run_of(folder: Path, **env: str) -> tuple[dict, list[str]]:
    """What tests.harness.miscompiled prints, and what was disassembled."""
    log, script = folder / "log", folder / "nvdisasm"
    script.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {knobs.nvidia.nvdisasm.path} "$@"\n')
    script.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.miscompiled"],
        env={**os.environ, "TRITON_NVDISASM_PATH": str(script), **env},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout), [line for line in log.read_text().splitlines() if ".cubin" in line]


def test_a_miscompiled_kernel_is_refused_before_it_is_loaded(tmp_path):
    """At each launch, so that its tuning is not used. What is compiled correctly is launched, with another ptxas too.
    Each form is disassembled once."""
    found, disassembled = run_of(tmp_path)
    [said] = {*found["wrong"]}
    assert said.startswith("corrected was miscompiled by ptxas 12.8: it reads a wild address in shared memory")
    assert "train.plain_ops" in said and "R1, " in said.rpartition(":")[2]
    assert found["right"] == ["", "", ""] and len(disassembled) == 2 and found["hooks"] == 1
    wrong, right = (found["outcomes"][f"corrected: triton {warps}, bfloat16"] for warps in (8, 4))
    assert wrong.startswith("does not run: MiscompiledKernel: corrected was miscompiled by ptxas 12.8")
    assert right.startswith("matmuls: output differs") and found["number"] is None  # here launches do nothing
    assert f"set TRITON_PTXAS_PATH={found['other_ptxas']} " in said
    found, _ = run_of(tmp_path, TRITON_PTXAS_PATH=found["other_ptxas"])
    assert found["wrong"] == ["", "", ""]


def test_what_was_found_is_read_by_later_loads(tmp_path):
    """But not what another search found."""
    files = {name: str(tmp_path / name) for name in ("kernel.cubin", "kernel.ptx", "kernel.json")}
    kept = tmp_path / "kernel.searched"
    for found in ("", "R2UR UR46, R1"):
        keep(kept, found)
        assert read(kept) == wrong_in(files) == found
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.searched"]
    kept.write_text(kept.read_text().replace(SEARCH, "search 0"))
    assert read(kept) is None and wrong_in(files) == ""


def test_what_cannot_be_searched_is_not_refused(tmp_path):
    """Nor is that remembered; in a folder that cannot be written to, nothing is."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(b"no machine code")
    files = {"kernel.cubin": str(cubin)}
    assert stack_in_descriptor_of(cubin) is None
    assert wrong_in(files) == wrong_in({"kernel.hsaco": str(cubin)}) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.cubin"]
    keep(tmp_path / "absent" / "kernel.searched", "")
