"""Published block-scaled FP8 weights: loaded in any layout they are what transformers makes of them; what does not
fit is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.convert import import_weights
from phalanx.checkpoint.hf import from_hf, to_hf
from phalanx.checkpoint.readers.fp8 import ScaledBox
from phalanx.checkpoint.tensors import open_tensors
from phalanx.layout.box import Box
from tests.harness.checkpoints import error_on_rank, make_run
from tests.harness.parity import MODELS
from tests.models.test_moe_models import hf_model, saved

BLOCK = (7, 16)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def quantized(whole: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 values and a scale for each block, of which the last of a row or column may be smaller."""
    rows, columns = (-(-n // b) for n, b in zip(whole.shape, block))
    scales = torch.empty(rows, columns)
    values = torch.empty(whole.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = whole[at].abs().max() / 448
            values[at] = (whole[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def meant(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """What they stand for by transformers' own conversion, whose blocks divide the matrix: this one is padded for
    it."""
    whole = torch.zeros(scales.shape[0] * block[0], scales.shape[1] * block[1], dtype=torch.float8_e4m3fn)
    whole[: values.shape[0], : values.shape[1]] = values
    return Fp8Dequantize(None)._dequantize_one(whole, scales, torch.float32)[: values.shape[0], : values.shape[1]]


def published(folder, separate: bool = True) -> dict[str, np.ndarray]:
    """A folder of a small DeepSeek-V3 in two files: matrices of layers quantised, the rest as it is (routers too);
    and the truth."""
    torch.manual_seed(0)
    config = MODELS["deepseek_v3"]
    theirs = hf_model(config)
    with torch.no_grad():
        for t in (
            *theirs.parameters(),
            *(b for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias")),
        ):
            t.normal_()
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    truth = {}
    for name, array in saved(theirs).items():
        truth[name] = files[0][name] = torch.from_numpy(array.copy())
        if name.endswith("_proj.weight") or "_proj_with_mqa" in name:
            files[0][name], scales = quantized(truth[name], BLOCK)
            files[separate][f"{name}_scale_inv"], truth[name] = scales, meant(files[0][name], scales, BLOCK)
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for file, tensors in zip(names, files):
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {k: n for n, f in zip(names, files) for k in f}})
    )
    (folder / "config.json").write_text(json.dumps({**to_hf(config, torch.bfloat16), "quantization_config": FP8}))
    return {name: t.double().numpy() for name, t in truth.items()}


@pytest.mark.parametrize(
    "world, layout", [(1, dict()), (4, dict(tp=2, ep=2, etp=2)), (4, dict(pp=2, ep=2)), (4, dict(tp=4, ep=4))], ids=str
)
def test_fp8_weights_load_as_transformers_scales_them(ranks, tmp_path, world, layout):
    truth = published(tmp_path)
    wrong = ranks.run(
        "tests.harness.checkpoints:load_weights_on_rank",
        world,
        make_run("deepseek_v3", "fp32", **layout),
        tmp_path,
        truth,
    )
    assert wrong == [[]] * world


def test_import_scales(tmp_path):
    """Truth: transformers' conversion, rounded to the dtype of the config; the report says by how much."""
    truth = published(tmp_path)
    folder = import_weights(tmp_path, tmp_path / "ours", tmp_path, {n: t.shape for n, t in truth.items()})
    made, lines = load_file(folder / "model.safetensors"), json.loads((folder / "parity.json").read_text())["tensors"]
    for name, expected in truth.items():
        wanted = torch.from_numpy(expected)
        packed = name.endswith("_proj.weight") or "_proj_with_mqa" in name
        assert (
            torch.equal(made[name], wanted.to(torch.bfloat16 if packed else torch.float32))
            and (lines[name]["differing"] > 0) == packed
        )
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


class Watched:
    """An open file that notes what is read."""

    def __init__(self, file):
        self.file, self.boxes = file, {}

    def read(self, key, where=()):
        self.boxes[key] = where
        return self.file.read(key, where)


@pytest.mark.parametrize(
    "box, blocks",
    [
        (Box((0, 0), (300, 200)), ((0, 3), (0, 2))),
        (Box((127, 128), (129, 130)), ((0, 2), (1, 2))),
        (Box((256, 3), (300, 4)), ((2, 3), (0, 1))),
    ],
    ids=str,
)
def test_boxes_read_only_their_scales(tmp_path, box, blocks):
    torch.manual_seed(0)
    values, scales = quantized(torch.randn(300, 200) * torch.logspace(-3, 3, 300).unsqueeze(1), (128, 128))
    save_file({"x": values, "x_scale_inv": scales}, tmp_path / "a.safetensors")
    part = ScaledBox("a.safetensors", "x", Box.full((300, 200)), "a.safetensors", "x_scale_inv", (128, 128))
    with open_tensors(tmp_path / "a.safetensors") as file:
        watched = Watched(file)
        found = part.read(lambda name: watched, box.slices())
    assert torch.equal(found, meant(values, scales, (128, 128))[box.slices()])
    assert watched.boxes == {"x": box.slices(), "x_scale_inv": tuple(slice(*b) for b in blocks)}


def test_the_config_of_a_quantised_folder():
    config = to_hf(MODELS["deepseek_v3"], torch.bfloat16)
    assert from_hf({**config, "quantization_config": FP8}) == from_hf(config)
    for odd in (
        {"weight_block_size": None},
        {"weight_block_size": [128]},
        {"weight_block_size": [128, 0]},
        {"fmt": "e3m4"},
        {"quant_method": "awq"},
    ):
        with pytest.raises(CheckpointError, match="quantization_config"):
            from_hf({**config, "quantization_config": {**FP8, **odd}})


NAME = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    "change, told",
    [
        (
            {f"{NAME}_scale_inv": torch.ones(2, 3)},
            ["not a scale for each block of 7 x 16", f"{NAME} (14, 32) with {NAME}_scale_inv (2, 3)"],
        ),
        ({f"{NAME}_scale_inv": None}, [f"{NAME} is stored as torch.float8_e4m3fn without scales"]),
        (
            {f"{NAME}_scale_inv": torch.ones(2, 2, dtype=torch.int32)},
            [f"{NAME}_scale_inv are of torch.float8_e4m3fn and torch.int32"],
        ),
        ({NAME: torch.ones(14, 32)}, [f"{NAME}_scale_inv are of torch.float32 and torch.float32, not of float8"]),
        ({NAME: None}, [f"missing: {NAME} (14, 32)", f"not in the model: {NAME}_scale_inv (2, 2)"]),
        ({NAME: torch.ones(14, 32, dtype=torch.int8), f"{NAME}_scale_inv": None}, [f"{NAME} is stored as torch.int8"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, told):
    published(tmp_path, separate=False)
    file = tmp_path / "model-00001-of-00002.safetensors"
    save_file({n: t for n, t in {**load_file(file), **change}.items() if t is not None}, file)
    text = error_on_rank(0, 1, make_run("deepseek_v3", "fp32"), "load_weights", tmp_path)
    assert all(part in text for part in told), text


def test_scales_without_a_block_size_are_refused(tmp_path):
    published(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "does not tell the block that a scale is of" in error_on_rank(
        0, 1, make_run("deepseek_v3", "fp32"), "load_weights", tmp_path
    )
