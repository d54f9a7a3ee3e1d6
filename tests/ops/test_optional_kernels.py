"""Implementations from optional packages, on a machine without them: who is asked, what is refused, and the op around
the package's GEMMs.

Their kernels themselves run on GPUs alone: tests/gpu/checks.py.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.config.device_check import Facts
from phalanx.config.read import load_run
from phalanx.forecast.check import check
from phalanx.layout.grid import Grid
from phalanx.ops.attention.flash import flash_fits, spans_of
from phalanx.ops.dense.activation import swiglu
from phalanx.ops.dense.gated_mlp import MLP, PlainGemms, gated_mlp, gated_mlp_fits
from phalanx.ops.dense.matmul import gather_matmul, matmul_scatter
from phalanx.ops.op import Package, absent, packaged
from phalanx.sequence.batch import Batch, room_for_documents, usual_documents
from tests.ops.test_ops import normal

ONE = Axis("tp")
MADE = packaged()
PACKAGES = {op: made.package for op, made in MADE.items()}
LLAMA = "recipes/tiny_llama.yaml"


def problems(overrides: list[str], facts: Facts) -> list:
    return check(load_run(LLAMA, overrides), facts)


def test_auto_leaves_them_alone_where_they_cannot_run():
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    for made in MADE.values():
        assert not made.takes("auto", x, (64, 64))  # not a GPU
        assert not made.takes("plain", x, (64, 64)) and not made.takes("triton", x, (64, 64))
        assert made.takes("optional", x, (64, 64))  # asked for by name: no silent fallback
    assert MLP.fast("auto", x, 64, 64) is None and MLP.choose("auto", x, 64, 64) is PlainGemms


def install(folder: Path, package: Package, version: str | None) -> None:
    """What importlib.metadata reads of a package."""
    info = folder / f"{package.name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {version}\n")


@pytest.fixture
def known_anew():
    absent.cache_clear()
    yield
    absent.cache_clear()


def test_the_tested_version_alone_is_taken(monkeypatch, tmp_path, known_anew):
    folder, attention, mlp = tmp_path / "site-packages", PACKAGES["attention"], PACKAGES["mlp"]
    install(folder, attention, attention.version)
    install(folder, mlp, "0.0.1")
    monkeypatch.syspath_prepend(folder)
    assert absent(attention) is None
    assert all(said in absent(mlp) for said in ("0.0.1", mlp.version))


def test_a_package_that_works_in_some_folders_only_is_named(monkeypatch, tmp_path, known_anew):
    """pip's --target may have any name: the first MLP would end the run."""
    mlp = PACKAGES["mlp"]
    install(tmp_path / "shared", mlp, mlp.version)
    monkeypatch.syspath_prepend(tmp_path / "shared")
    assert absent(mlp) == (
        f"{mlp.name} is in {tmp_path / 'shared'}: it works only in a folder named site-packages or dist-packages"
    )
    install(tmp_path / "site-packages", mlp, mlp.version)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    absent.cache_clear()
    assert absent(mlp) is None


def test_the_extra_pins_the_tested_versions():
    tomllib = pytest.importorskip("tomllib")
    with open("pyproject.toml", "rb") as file:
        extra = tomllib.load(file)["project"]["optional-dependencies"]["kernels"]
    for package in PACKAGES.values():
        assert f"{package.name}=={package.version}" in extra


def test_devices_are_judged_by_capability():
    incapable = MADE["mlp"].incapable
    assert incapable((9, 0)) is None and incapable((10, 0)) is None and incapable((12, 0)) is None
    assert incapable((8, 0)) == "compute capability 8.0, 9.0 or newer is needed"
    assert incapable((9, 4), nvidia=False) == "not an NVIDIA GPU"


HERE = [w for w in PACKAGES.values() if importlib.metadata.packages_distributions().get(w.module.split(".")[0])]


@pytest.mark.skipif(bool(HERE), reason="the packages are installed")
def test_absent_packages_are_named():
    for package in PACKAGES.values():
        assert absent(package) == f"{package.name} {package.version} is not installed"


def test_refused_by_name():
    hopper = Facts(device="cuda", device_count=1, device_name="NVIDIA H200", files=False)
    bf16 = ["train.kernels=optional", "train.precision=bf16", "model.head_dim=64"]
    assert problems(bf16, hopper) == []
    assert problems(bf16, Facts(files=False)) == []  # a plan on a laptop
    [none] = problems(bf16, Facts(device_count=0, files=False))
    assert (none.field, none.valid, none.because) == ("train.kernels", ("auto",), {"device": "CPU"})
    lacking = replace(hopper, no_optional_kernels=(("attention", "compute capability 8.0, 9.0 or newer is needed"),))
    [old] = problems(bf16, lacking)
    assert old.field == "train.kernels" and "8.0" in old.because["attention"] and "triton" in old.valid
    assert problems([*bf16, "train.plain_ops=[attention]"], lacking) == []
    [dtype] = problems([*bf16, "train.precision=fp32"], hopper)
    assert dtype.because == {"train.precision": "fp32"}
    [heads] = problems([*bf16, "model.head_dim=20"], hopper)
    assert heads.because == {"width of a head": 20}
    assert problems([*bf16, "model.head_dim=20", "train.plain_ops=[attention]"], hopper) == []
    assert problems([*bf16, "data.document_attention=true"], hopper) == []
    assert problems([*bf16, "model.family=mistral", "model.sliding_window=32"], hopper) == []
    [latent] = check(
        load_run("recipes/tiny_deepseek_v3.yaml", ["train.kernels=optional", "train.precision=bf16"]), hopper
    )
    assert "and" in latent.because["width of a head"]
    [inner] = problems([*bf16, "model.intermediate_size=100"], hopper)
    assert inner.because["model.intermediate_size"] == 100


def test_spans_are_the_documents():
    """Runs of equal numbers; numbers that no token has are empty runs, and there may be room for more."""
    numbers = torch.tensor([0, 0, 1, 3, 3, 3, 4, 6])
    batch = Batch(numbers, numbers, numbers, numbers, 2, 4, numbers, most_documents=9)
    spans = spans_of(batch)
    runs = [(a, b) for a, b in itertools.pairwise(spans.offsets.tolist()) if b > a]
    assert runs == [(0, 2), (2, 3), (3, 6), (6, 7), (7, 8)] and len(spans.offsets) == 10 and not spans.whole
    assert spans.offsets.dtype == torch.int32 and spans.longest == 4
    whole = spans_of(replace(batch, documents=None, _made={}))
    assert whole.offsets.tolist() == [0, 4, 8] and whole.whole
    assert len(spans_of(replace(batch, most_documents=0, _made={})).offsets) == 9  # not counted: one for each token


def test_room_for_documents_is_enough_and_seldom_grows():
    for tokens, count in itertools.product((1, 100, 8192), (1, 2, 15, 16, 17, 8192)):
        assert count <= room_for_documents(count, tokens) <= max(2 * count, usual_documents(tokens))
    assert {room_for_documents(n, 8192) for n in range(1, 17)} == {16}


def test_shapes():
    assert (
        flash_fits(64, 64)
        and flash_fits(128, 128)
        and flash_fits(192, 128)
        and not flash_fits(20, 20)
        and not flash_fits(256, 256)
    )
    assert gated_mlp_fits(4096, 14336) and not gated_mlp_fits(4096, 14340) and not gated_mlp_fits(100, 64)


# ---- the op around the package's GEMMs, with their reference implementations -------------------------------------


def both(tp: Axis, tokens: int, width: int, inner: int, dtype: torch.dtype, buffers: bool) -> list[list[torch.Tensor]]:
    """Output and gradients of the MLP in three ops and in one; this rank's tokens and features are drawn by its
    index."""
    found = []
    for fused in (False, True):
        x = normal(tokens, width, seed=tp.index, dtype=dtype).requires_grad_()
        gate_up, down = (
            normal(*s, seed=10 * i + tp.index, dtype=dtype).requires_grad_()
            for i, s in ((1, (2 * inner, width)), (2, (width, inner)))
        )
        if buffers:
            for p in (gate_up, down):
                p.grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
                p.grad = torch.ones(p.shape, dtype=p.grad_dtype)
        if fused:
            y = gated_mlp(x, gate_up, down, tp, PlainGemms)
        else:
            y = matmul_scatter(swiglu(gather_matmul(x, gate_up, tp), "plain"), down, tp)
        y.backward(normal(*y.shape, seed=99 + tp.index, dtype=dtype))
        found.append([y.detach(), x.grad, gate_up.grad, down.grad])
    return found


@pytest.mark.parametrize("buffers", [True, False])
def test_one_op_equals_three(buffers):
    for tokens, width, inner in ((7, 5, 3), (16, 8, 24)):
        for a, b in zip(*both(ONE, tokens, width, inner, torch.float64, buffers)):
            assert a.dtype == b.dtype and (a - b).abs().max() <= 1e-12 * a.abs().max()


def test_one_op_keeps_less():
    kept = []
    for fused in (False, True):
        seen: list[int] = []
        x, gate_up, down = (normal(*s, seed=i).requires_grad_() for i, s in enumerate(((16, 8), (48, 8), (8, 24))))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t.nbytes) or t, lambda t: t):
            gated_mlp(x, gate_up, down, ONE, PlainGemms) if fused else matmul_scatter(
                swiglu(gather_matmul(x, gate_up, ONE), "plain"), down, ONE
            )
        kept.append(sum(seen))
    assert kept[0] - kept[1] == 16 * 24 * x.element_size()  # the hidden tokens


def over_tp(rank: int, world: int) -> float:
    mesh = Mesh(Grid(tp=world), rank, torch.device("cpu"))
    worst = max(
        ((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*both(mesh.tp, 6, 5, 3, torch.float64, True))
    )
    mesh.close()
    return worst


def test_one_op_equals_three_over_tp(ranks):
    assert max(ranks.run("tests.ops.test_optional_kernels:over_tp", 2)) <= 1e-12
