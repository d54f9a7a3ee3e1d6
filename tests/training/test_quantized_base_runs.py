"""Runs with lora.base: the base is quantized while it is loaded, one tensor at a time, again to the same bytes on
resume, and no checkpoint holds it."""

from __future__ import annotations

import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.base.errors import CheckpointError
from phalanx.base.placement import Placement
from phalanx.checkpoint.contents import Contents
from phalanx.checkpoint.load import load_weights
from phalanx.cli.checkpoints import merged
from phalanx.comm.mesh import Mesh
from phalanx.config.run import CheckpointConfig, Run
from phalanx.data_parallel.base_storage import BaseStorage
from phalanx.engine.build import State, build, build_for_inference, init_weights
from phalanx.forecast.decide import make_plan
from phalanx.inference.load import load_alone, without_training
from phalanx.layout.config import LayoutConfig
from phalanx.nn.adapter import find_adapter
from phalanx.ops.quantized.base_formats import FORMATS
from phalanx.ops.quantized.base_weights import EncodedMatrices, EncodedMatrix, decode_
from phalanx.ops.quantized.base_weights import encode as encoded_alone
from phalanx.optim.config import OptimConfig
from phalanx.training.main import train
from tests.harness.checkpoints import error_on_rank
from tests.harness.generation import whole_logits
from tests.training.test_loop import make_run

BF16 = "bf16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of the tiny model."""
    run = replace(make_run(tmp_path_factory.mktemp("base"), steps=1), checkpoint=CheckpointConfig(interval=1))
    train(run, Placement())
    return shutil.copytree(Path(run.dir) / "checkpoints/step-00000001/weights", Path(run.dir) / "hf")


def qlora(run: Run, base: str = "nf4", **fields) -> Run:
    lora = find_adapter("lora").Config(rank=3, alpha=7.0, base=base)
    return replace(run, lora=lora, checkpoint=CheckpointConfig(interval=2), **fields)


def state_of(run: Run, rank: int = 0, world: int = 1) -> State:
    plan = make_plan(run, world)
    return build(plan, Mesh(plan.grid, rank))


def stored(state: State) -> list[torch.Tensor]:
    return [f.storage.kept for f in state.buffers.flat if isinstance(f.storage, BaseStorage)]


def state_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {k: t for file in (path / "state").glob("*.safetensors") for k, t in load_file(file).items()}


@pytest.mark.parametrize("named", [True, False], ids=["from a folder", "drawn at random"])
def test_a_run_goes_on_to_the_same_bits_and_holds_no_base(folder, tmp_path, named):
    """Truth: the run that was never interrupted."""
    base = {"init_from": str(folder)} if named else {}
    whole, halves = (qlora(make_run(tmp_path / name, steps=4), **base) for name in ("whole", "halves"))
    train(whole, Placement())
    shutil.copytree(whole.dir, halves.dir)
    shutil.rmtree(tmp_path / "halves/checkpoints/step-00000004")
    train(halves, Placement())
    ends = [tmp_path / name / "checkpoints/step-00000004" for name in ("whole", "halves")]
    first, second = map(state_tensors, ends)
    assert first.keys() == second.keys() and all(torch.equal(t, second[k]) for k, t in first.items())
    with Contents(ends[1]) as contents:
        names = set(contents.shapes("weights")) | set(contents.shapes("master"))
    assert any(".lora_A" in name for name in names) and any("norm" in name for name in names)
    assert not [name for name in names if name.endswith("_proj.weight")]
    if not named:  # then nothing may take the base's place
        with pytest.raises(CheckpointError, match="drawn at random, which init_from="):
            train(replace(halves, init_from=str(folder), train=replace(halves.train, steps=5)), Placement())


@pytest.mark.parametrize("base, precision, near", [("nf4", BF16, 1e-3), ("nf4", "fp32", 1e-5), ("fp8", "fp32", 1e-5)])
def test_a_base_that_was_drawn_is_merged_and_generated_with(tmp_path, base, precision, near):
    """Truth: the values that a training rank decodes; adapters add next to nothing to them. Generation on a CPU decodes
    them in fp32."""
    run = qlora(make_run(tmp_path / "run", steps=1, precision=precision), base)
    train(replace(run, optim=OptimConfig(lr=1e-30)), Placement())
    step = tmp_path / "run/checkpoints/step-00000001"
    tensors = load_file(merged(str(step), str(tmp_path / "merged"), None) / "model.safetensors")
    state, seen = state_of(run), set()
    init_weights(state.model)
    for flat in (f for f in state.buffers.flat if isinstance(f.storage, BaseStorage)):
        _, values = flat.storage.values()
        for slot in flat.bucket.slots:
            held = values[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            for piece in slot.spec.pieces:
                assert torch.equal(piece.of(held), tensors[piece.name].to(held.dtype)), piece.name
                seen.add(piece.name)
    assert seen == {name for name in tensors if name.endswith("_proj.weight")}
    found, truth = (load_alone(folder) for folder in (step / "weights", tmp_path / "merged"))
    prompt = list(range(3, 14))
    torch.testing.assert_close(whole_logits(found, prompt), whole_logits(truth, prompt), rtol=0, atol=near)


@pytest.mark.parametrize("base", FORMATS)
def test_it_is_loaded_as_it_is_encoded(folder, base):
    """Truth: the whole tensors of the file, rounded to bf16, encoded and decoded alone."""
    state = state_of(qlora(make_run(Path("unused"), precision=BF16), base))
    load_weights(folder, state.buffers, state.mesh)
    tensors, seen = load_file(folder / "model.safetensors"), set()
    for flat in (f for f in state.buffers.flat if isinstance(f.storage, BaseStorage)):
        first, values = flat.storage.values()
        assert first == 0 and values.dtype == torch.bfloat16
        for slot in flat.bucket.slots:
            held = values[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            for piece in slot.spec.pieces:
                truth, encoded = tensors[piece.name].bfloat16(), flat.storage.matrices[0].placed.encoded
                alone = replace(encoded, box=replace(encoded.box, shape=truth.shape, start=(0, 0), stop=truth.shape))
                out = torch.empty_like(truth)
                matrix = EncodedMatrix(alone, 0, 0, (truth.shape[1], 1))
                decode_(out.view(-1), encoded_alone(truth, alone), EncodedMatrices(alone.format, (matrix,)))
                assert torch.equal(piece.of(held), out) and not torch.equal(out, truth), piece.name
                assert (out.float() - truth.float()).abs().max() < 0.2 * truth.float().abs().max(), piece.name
                seen.add(piece.name)
    assert seen == {name for name in tensors if name.endswith("_proj.weight")}


class AliveMatrices(TorchDispatchMode):
    """The largest number of tensors in bf16 of at least `numel` elements that were made inside and alive at once."""

    def __init__(self, numel: int):
        super().__init__()
        self.numel, self.most, self._known = numel, 0, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16 and t.numel() >= self.numel:
                storage = t.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._known.add(storage._cdata)
                    weakref.finalize(storage, self._known.discard, storage._cdata)
        self.most = max(self.most, len(self._known))
        return out


@pytest.mark.parametrize("load", [True, False], ids=["from a folder", "drawn at random"])
def test_one_matrix_is_in_full_precision_at_a_time(folder, load, monkeypatch):
    """Also: this test sees two, if there are two."""

    def most() -> int:
        state = state_of(qlora(make_run(Path("unused"), precision=BF16)))
        with AliveMatrices(16 * 16) as seen:
            if load:
                load_weights(folder, state.buffers, state.mesh)
            else:
                init_weights(state.model)
        return seen.most

    # besides a matrix the embedding, which stays in bf16, is drawn whole
    assert most() == 1
    kept, original = [], BaseStorage.encode
    monkeypatch.setattr(BaseStorage, "encode", lambda s, m, values: (kept.append(values), original(s, m, values))[1])
    assert most() > 1


def bytes_on_rank(rank: int, world: int, run: Run, folder: Path) -> list[torch.Tensor]:
    state = state_of(run, rank, world)
    load_weights(folder, state.buffers, state.mesh)
    return stored(state)


def test_shards_are_the_bytes_of_the_whole(ranks, folder):
    """Truth: one process. Each rank of ZeRO-3 keeps its part of the same bytes, matrices cut anywhere."""
    run = qlora(make_run(Path("unused"), precision=BF16))
    (whole,) = ranks.run("tests.training.test_quantized_base_runs:bytes_on_rank", 1, run, folder)
    cut = replace(run, layout=LayoutConfig(sharding=3))
    parts = ranks.run("tests.training.test_quantized_base_runs:bytes_on_rank", 3, cut, folder)
    for number, expected in enumerate(whole):
        joined = torch.cat([torch.as_tensor(part[number]) for part in parts])
        assert len(parts[0][number]) == len(joined) // 3
        assert torch.equal(joined[: len(expected)], torch.as_tensor(expected)) and not joined[len(expected) :].any()


def test_a_weight_that_is_not_finite_is_named(folder, tmp_path):
    bad = shutil.copytree(folder, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, bad / "model.safetensors")
    text = error_on_rank(0, 1, qlora(make_run(Path("unused"))), "load_weights", bad)
    assert "model.layers.1.mlp.up_proj.weight holds Inf or NaN" in text and "lora.base=bf16 can" in text


def test_what_generates_has_the_base_that_was_trained(folder):
    """Truth: the weights that training decodes."""
    run = qlora(make_run(Path("unused"), precision=BF16))
    state = state_of(run)
    load_weights(folder, state.buffers, state.mesh)
    plan = make_plan(without_training(run, 1), 1)
    mesh = Mesh(plan.grid, 0)
    buffers, _ = build_for_inference(plan, mesh)
    load_weights(folder, buffers, mesh)
    pairs = [(a, b) for a, b in zip(state.buffers.flat, buffers.flat, strict=True) if a.bucket.base_format]
    assert pairs and all(torch.equal(a.storage.values()[1], b.weight) and b.weight.any() for a, b in pairs)


def test_a_checkpoint_without_its_base_says_so(folder, tmp_path):
    run = qlora(make_run(tmp_path, steps=2))
    train(run, Placement())
    weights = tmp_path / "checkpoints/step-00000002/weights"
    with pytest.raises(CheckpointError, match="a checkpoint does not hold it"):
        state = state_of(run)
        load_weights(weights, state.buffers, state.mesh)
