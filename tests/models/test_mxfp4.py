"""Published MXFP4 weights: loaded in any layout they are what transformers makes of them; pairs that do not fit are
named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.hf import from_hf, to_hf
from phalanx.checkpoint.readers.mxfp4 import PackedBox, unpacked
from phalanx.checkpoint.tensors import open_tensors
from phalanx.cli.main import cli
from phalanx.config.run import Run
from phalanx.layout.box import Box
from tests.harness.checkpoints import error_on_rank, make_run
from tests.harness.parity import MODELS

MODEL = replace(MODELS["gpt_oss"], hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_local_experts=4)
EXPERTS = ("gate_up_proj", "down_proj")


def run_of(**layout) -> Run:
    return replace(make_run("gpt_oss", "fp32", **layout), model=MODEL)


def packed(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks (E, R, G, 16), every byte, and scales (E, R, G), every exponent that floats of 32 bits hold
    whole."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(2, 252, shape, generator=generator, dtype=torch.uint8)


def published(folder, scales_apart: bool) -> dict[str, np.ndarray]:
    """A folder as gpt-oss is published, experts packed and the rest bf16, in two files; and the truth: transformers'
    conversion."""
    import transformers

    torch.manual_seed(0)
    config = to_hf(MODEL, torch.bfloat16)
    theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**config)).to(torch.bfloat16)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    truth = {}
    for number, (name, tensor) in enumerate(theirs.state_dict().items()):
        if not name.endswith(EXPERTS):
            files[number % 2][name], truth[name] = tensor.contiguous(), tensor
            continue
        experts, columns, rows = tensor.shape
        blocks, scales = packed(experts, rows, columns // 32, seed=number)
        files[0][f"{name}_blocks"], files[scales_apart][f"{name}_scales"] = blocks, scales
        truth[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for name, tensors in zip(names, files):
        save_file(tensors, folder / name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {k: n for n, f in zip(names, files) for k in f}})
    )
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return {name: tensor.double().numpy() for name, tensor in truth.items()}


@pytest.mark.parametrize(
    "world, layout", [(1, dict()), (4, dict(tp=2, ep=2, etp=2)), (4, dict(ep=2, pp=2, sharding=1))], ids=str
)
def test_packed_experts_load_as_transformers_unpacks_them(ranks, tmp_path, world, layout):
    truth = published(tmp_path, scales_apart=world > 1)
    wrong = ranks.run("tests.harness.checkpoints:load_weights_on_rank", world, run_of(**layout), tmp_path, truth)
    assert wrong == [[]] * world


def test_every_byte_and_scale():
    """Truth: transformers' conversion, with a scale of 0 (2^-127, below the normal numbers) and of 254 too."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(254, 1).view(1, 254, 16, 16)
    scales = torch.arange(254, dtype=torch.uint8).view(1, 254, 1).repeat(1, 1, 16)
    assert torch.equal(unpacked(blocks, scales).mT, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


def test_boxes_that_cut_blocks(tmp_path):
    blocks, scales = packed(3, 5, 4, seed=1)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "a.safetensors")
    part = PackedBox("a.safetensors", "x_blocks", Box.full((3, 128, 5)), "a.safetensors", "x_scales")
    whole = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    with open_tensors(tmp_path / "a.safetensors") as file:
        for box in (
            Box((0, 0, 0), (3, 128, 5)),
            Box((1, 31, 2), (2, 33, 5)),
            Box((0, 64, 4), (3, 65, 5)),
            Box((2, 95, 0), (3, 128, 1)),
        ):
            assert torch.equal(part.read(lambda name: file, box.slices()), whole[box.slices()])


def test_the_config_of_a_packed_folder():
    config = to_hf(MODEL, torch.bfloat16)
    assert from_hf(
        {**config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    ) == from_hf(config)
    with pytest.raises(CheckpointError, match="quantization_config"):
        from_hf({**to_hf(MODELS["mixtral"], torch.bfloat16), "quantization_config": {"quant_method": "mxfp4"}})


def change(folder, name: str, edit) -> None:
    """Replace a tensor of the folder (None: leave it out)."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            made = edit(tensors.pop(name))
            save_file(tensors if made is None else {**tensors, name: made}, file)


AT = "model.layers.0-1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    "end, make, told",
    [
        (
            "down_proj_scales",
            lambda t: t[:, :-1].contiguous(),
            ["not MXFP4", "layers.1.mlp.experts.down_proj_blocks (4, 64, 3, 16)", "(4, 63, 3)"],
        ),
        (
            "down_proj_blocks",
            lambda t: t[..., :8].contiguous(),
            ["not MXFP4", "layers.1.mlp.experts.down_proj_blocks (4, 64, 3, 8)"],
        ),
        (
            "down_proj_scales",
            lambda t: None,
            [f"missing: {AT} (4, 96, 64) (2 tensors)", f"not in the model: {AT}_blocks"],
        ),
        ("down_proj_scales", lambda t: torch.full_like(t, 255), ["down_proj_scales holds a scale of 255"]),
        ("down_proj_scales", lambda t: t.float(), ["are of torch.uint8 and torch.float32"]),
        (
            "gate_up_proj_bias",
            lambda t: t[:3].contiguous(),
            ["0-1.mlp.experts.gate_up_proj_bias has (3, 192), the model wants (4, 192)"],
        ),
        ("router.bias", lambda t: None, ["missing: model.layers.0-1.mlp.router.bias (4,)"]),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, end, make, told):
    published(tmp_path, scales_apart=False)
    for layer in range(2):
        owner = "mlp" if "router" in end else "mlp.experts"
        change(tmp_path, f"model.layers.{layer}.{owner}.{end}", make)
    text = error_on_rank(0, 1, run_of(), "load_weights", tmp_path)
    assert all(part in text for part in told), text


def test_import_unpacks(tmp_path):
    """Truth: transformers' conversion, of which bf16 holds every value. The folder that is made is plain:
    transformers loads it as it lies."""
    from transformers import AutoModelForCausalLM

    truth = published(make(tmp_path / "theirs"), scales_apart=True)
    code = CliRunner().invoke(
        cli, ["import", str(tmp_path / "theirs"), "--config", str(tmp_path / "theirs"), "-o", str(tmp_path / "ours")]
    )
    assert code.exit_code == 0, code.output
    made = load_file(tmp_path / "ours/model.safetensors")
    assert made.keys() == truth.keys() and {t.dtype for t in made.values()} == {torch.bfloat16}
    for name, expected in truth.items():
        np.testing.assert_array_equal(made[name].double().numpy(), expected)
    assert json.loads((tmp_path / "ours/parity.json").read_text())["exact"]
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = model.model.layers[1].mlp.experts.down_proj.detach().double().numpy()
    np.testing.assert_array_equal(loaded, truth["model.layers.1.mlp.experts.down_proj"])
    change(tmp_path / "theirs", "model.layers.0.mlp.experts.down_proj_scales", lambda t: t[:, :-1].contiguous())
    code = CliRunner().invoke(
        cli, ["import", str(tmp_path / "theirs"), "--config", str(tmp_path / "theirs"), "-o", str(tmp_path / "b")]
    )
    assert "not MXFP4" in str(code.exception) and not (tmp_path / "b").exists()


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder
