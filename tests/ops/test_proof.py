"""Kernels that prove themselves (phalanx.ops.proof): what differs from the reference is not used. On the CPU, Triton's
kernels are interpreted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from threading import Barrier, Lock
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from phalanx.cli import doctor
from phalanx.ops import op as ops
from phalanx.ops import proof
from phalanx.ops.dense import norm_kernel
from phalanx.ops.dense.norm import NORM
from phalanx.ops.op import SLOWER, Case, Checked, Op, first_right, refused, table, triton, why_wrong
from phalanx.ops.optimizer.symmetric import SYMMETRIC, TILES, SymmetricTerms, SymmetricTiles, symmetric_matmul
from phalanx.ops.optimizer.symmetric_kernel import SymmetricProducts
from phalanx.ops.scan.step import SCAN_STEP

CPU = torch.device("cpu")


class HalfGradients:
    """Outputs of norms are right, gradients of their inputs half of what they should be: as some versions of Triton
    compiled other kernels (flash-linear-attention, issues 640 and 984)."""

    norm_forward = staticmethod(norm_kernel.norm_forward)

    @staticmethod
    def norm_backward(*call, **more):
        dx, *others = norm_kernel.norm_backward(*call, **more)
        return (dx / 2, *others)


class Miscompiled(SymmetricProducts):
    """With four warps the mirrored half is missing, with two nothing runs."""

    def matmul(self, a: Tensor, b: Tensor, c: Tensor | None, terms: SymmetricTerms) -> Tensor:
        if self.tiles.warps == 2:
            raise RuntimeError("out of resource: shared memory")
        found = super().matmul(a, b, c, terms)
        return found.tril() if self.tiles.warps == 4 else found


CRASHES, WRONG, RIGHT = (SymmetricTiles(32, 32, 1, warps) for warps in (2, 4, 8))


@pytest.fixture
def checks(tmp_path, monkeypatch):
    """A file of outcomes of its own; nothing is remembered from other tests."""
    found = proof.Checks(tmp_path / "cache" / proof.FILE)
    monkeypatch.setattr(proof, "checks", lambda: found)
    first_right.cache_clear()
    yield found
    first_right.cache_clear()


def test_where_ranks_do_not_agree_a_wrong_kernel_is_said(monkeypatch):
    """Generation asks ops alone, on what looks like a GPU here: once, with the reason and the cost."""
    monkeypatch.setattr(ops, "unusable", lambda *call: None)
    monkeypatch.setattr(ops, "first_right", lambda *call: Checked(None, "result 1 is half"))
    x = SimpleNamespace(is_meta=False, is_cuda=True, device=torch.device("cuda:0"), dtype=torch.bfloat16)
    with pytest.warns(UserWarning) as said:
        assert SCAN_STEP.choose("auto", x) is SCAN_STEP.choose("auto", x) is SCAN_STEP.reference
    [text] = (str(each.message) for each in said)
    assert text.startswith("op scan_step runs without its kernel") and "result 1 is half" in text and SLOWER in text


def planted(*tunings: SymmetricTiles):
    return triton(f"{__name__}:Miscompiled", tunings=tunings)


def test_a_wrong_gradient_is_found():
    assert not why_wrong(NORM, NORM.implementations[0], 0, CPU, torch.float32)
    found = why_wrong(NORM, triton(f"{__name__}:HalfGradients"), 0, CPU, torch.float32)
    assert found.startswith("rms_norm: result 1 differs by 0.5 of the largest value")


def test_a_wrong_tuning_is_never_used(checks):
    """The next one is, on the device of the call; the file says what was wrong."""
    made = planted(CRASHES, WRONG, RIGHT, TILES[-1])
    assert first_right(SYMMETRIC, made, CPU, torch.float32) == Checked(2)
    call = SimpleNamespace(is_cuda=True, device=CPU, dtype=torch.float32)  # stands for a tensor on a GPU
    assert SYMMETRIC.tuned(made, call).tiles == RIGHT
    said = checks.refused(proof.setting_of(CPU))
    assert [why.partition(":")[0] for why in said.values()] == ["does not run", "gram matrix"]
    assert all(str(t) in name for t, name in zip((CRASHES, WRONG), said)) and "out of resource" in str(said)


def test_where_no_tuning_is_right_the_reference_runs(checks, monkeypatch):
    made = planted(CRASHES, WRONG)
    checked = first_right(SYMMETRIC, made, CPU, torch.float32)
    assert checked.number is None and "gram matrix: output differs" in checked.why
    call = SimpleNamespace(is_cuda=True, device=CPU, dtype=torch.float32)
    assert SYMMETRIC.tuned(made, call) is None
    monkeypatch.setattr(made.__class__, "takes", lambda *call: True)
    with ops.only(SYMMETRIC, made):
        assert SYMMETRIC.choose("auto", call) is SYMMETRIC.reference


def test_an_outcome_is_kept_beside_the_compiled_kernels(checks, monkeypatch):
    """A later run reads it; other versions or sources check anew, and so does one that finds the file damaged."""
    made, counted = planted(WRONG, RIGHT), []
    monkeypatch.setattr(ops, "why_wrong", lambda *call: counted.append(call) or why_wrong(*call))
    for expected in (2, 2):
        first_right.cache_clear()
        assert first_right(SYMMETRIC, made, CPU, torch.float32) == Checked(1) and len(counted) == expected
    first_right.cache_clear()
    monkeypatch.setattr(proof, "setting_of", lambda device: "another version of Triton")
    assert first_right(SYMMETRIC, made, CPU, torch.float32) == Checked(1) and len(counted) == 4
    assert len(json.loads(checks.path.read_text())) == 2
    checks.path.write_text("{not json")
    first_right.cache_clear()
    assert first_right(SYMMETRIC, made, CPU, torch.float32) == Checked(1) and len(counted) == 6


def test_no_outcome_is_lost_where_processes_write_at_once(tmp_path):
    """Ranks of a machine compare a part of the kernels each, and read what the others found."""
    program = (
        "import sys; from pathlib import Path; from phalanx.ops.proof import Checks\n"
        "print('ready', flush=True); sys.stdin.read()\n"
        "for i in range(200): Checks(Path(sys.argv[1])).add('here', {f'{sys.argv[2]} {i}': ''})"
    )
    path, ends = tmp_path / proof.FILE, subprocess.PIPE
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(n)], stdin=ends, stdout=ends) for n in range(3)
    ]
    assert all(w.stdout.readline() == b"ready\n" for w in writers)
    for w in writers:
        w.stdin.close()
    assert [w.wait() for w in writers] == [0, 0, 0]
    assert set(proof.Checks(path).read()["here"]) == {f"{n} {i}" for n in range(3) for i in range(200)}


def test_a_folder_that_cannot_be_written_to_costs_only_the_next_check(tmp_path):
    (tmp_path / "file").write_text("")
    checks = proof.Checks(tmp_path / "file" / proof.FILE)
    checks.add("here", {"a": ""})
    assert not checks.read()


def test_what_is_wrong_is_listed_by_op_and_by_doctor(checks, monkeypatch):
    made = planted(WRONG)
    monkeypatch.setattr(made.__class__, "runs_on", lambda made, x: True)
    with ops.only(SYMMETRIC, made):
        found = refused([SYMMETRIC], CPU, torch.float32)
    assert list(found) == ["symmetric"] and found["symmetric"].startswith("triton: gram matrix: output differs")
    assert not doctor.wrong_kernels()
    monkeypatch.setattr(doctor, "gpus", lambda: [CPU])
    [(name, said)] = doctor.wrong_kernels()
    assert "warps=4" in name and "another tuning or the reference runs" in said
    assert name in doctor.report()


def test_ops_are_compared_beside_each_other(checks, monkeypatch):
    """In threads, of which none sees what another one has put in the place of an op's implementations."""
    wrong, right = planted(WRONG), planted(RIGHT)
    monkeypatch.setattr(wrong.__class__, "runs_on", lambda made, x: True)
    other = replace(SYMMETRIC, name="other", implementations=(right,))
    started, alone, seen = Barrier(2, timeout=60), Lock(), {}

    def compared(op, made, *call):
        with ops.only(op):
            started.wait()
            seen[op.name] = [each.choices == () for each in (SYMMETRIC, other)]
        with alone:  # Triton's interpreter is for one thread
            return why_wrong(op, made, *call)

    monkeypatch.setattr(ops, "why_wrong", compared)
    monkeypatch.setattr(ops.os, "cpu_count", lambda: 2)
    with ops.only(SYMMETRIC, wrong):
        assert list(refused([SYMMETRIC, other], CPU, torch.float32)) == ["symmetric"]
    assert seen == {"symmetric": [True, False], "other": [False, True]}


def test_every_triton_kernel_of_the_table_is_checked():
    """By small cases, with sizes that are no multiple of a block among them."""
    for op in table():
        for made in op.implementations:
            if made.package is not None and made.package.name == "triton":
                small = [case for case in op.cases if not case.large and made.has(case.asked)]
                assert made.checked and small, op.name


def test_rounding_is_no_difference():
    case = Case("sum", lambda x, kernels: x, ((3,),))
    truth = [torch.tensor([1.0, -2.0, 3.0])]
    assert not proof.difference(case, [truth[0] * (1 + 2**-8)], truth, torch.bfloat16)
    assert "output differs by 0.2" in proof.difference(case, [truth[0] * 1.2], truth, torch.bfloat16)
    assert "differs by nan" in proof.difference(case, [truth[0] * torch.nan], truth, torch.bfloat16)
    assert "has shape (2,)" in proof.difference(case, [truth[0][:2]], truth, torch.bfloat16)
    assert "2 outputs" in proof.difference(case, truth * 2, truth, torch.bfloat16)
    exact = Case("quantized", lambda x, kernels: x, ((3,),), exact=True)
    assert "to the bit" in proof.difference(exact, [truth[0] + 1e-6], truth, torch.float32)


def test_a_symmetric_product_is_symmetric():
    x = proof.normal(2, 70, 33, dtype=torch.float32)
    found = symmetric_matmul(x, x, kernels="triton")
    torch.testing.assert_close(found, x @ x.mT)
    assert isinstance(SYMMETRIC, Op) and torch.equal(found[:, :32, 40:64], found[:, 40:64, :32].mT)
