"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 against transformers: logits, loss and every gradient in float64 at several layouts,
from images of several sizes; positions by rows and columns; folders in both directions."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import from_hf, model_config_from_hf, resolved, to_hf
from phalanx.checkpoint.keep import latest
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.patches import PATCHES
from tests.harness.hf_fuzz_images import wide_towers
from tests.harness.parity import MODELS, assemble, sample_batch
from tests.harness.pictures import images_of, sizes_of, with_images
from tests.models.test_llava import compare_gradients, results_of, run_of

CASES = {
    "qwen2_5_vl": MODELS["qwen2_5_vl"],
    "qwen2_5_vl, tied, all windows": replace(
        MODELS["qwen2_5_vl"],
        tie_word_embeddings=True,
        vision=replace(MODELS["qwen2_5_vl"].vision, fullatt_block_indexes=(), window_size=4),
    ),
    "qwen3_vl": MODELS["qwen3_vl"],
    "qwen3_vl, tied, no DeepStack": replace(
        MODELS["qwen3_vl"],
        tie_word_embeddings=True,
        attention_bias=True,
        vision=replace(MODELS["qwen3_vl"].vision, deepstack_visual_indexes=(), num_position_embeddings=25),
    ),
    "qwen3_5": MODELS["qwen3_5"],
    "qwen3_5, tied, biases, all rotated": replace(
        MODELS["qwen3_5"],
        tie_word_embeddings=True,
        attention_bias=True,
        partial_rotary_factor=1.0,
        mrope_section=(3, 2, 1),
        layer_types=None,
        linear_conv_kernel_dim=4,
    ),
    "qwen3_5_moe": replace(MODELS["qwen3_5_moe"], router_aux_loss_coef=0.0),  # transformers balances another sum
}
LAYOUTS = {"one rank": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}, "tp2 pp2": {"tp": 2, "pp": 2}}
SHOWN = [
    *((case, "one rank") for case in CASES if case != "qwen3_5"),
    *((case, layout) for case in ("qwen2_5_vl", "qwen3_vl") for layout in ("tp2", "pp2", "cp2")),
    ("qwen3_5", "cp2"),
    *(
        pytest.param(*each, marks=pytest.mark.soak)
        for each in (("qwen3_5", "one rank"), ("qwen3_5", "tp2"), ("qwen3_5", "pp2"), ("qwen3_5_moe", "tp2"))
    ),
]
IDS = ([1, 2], [3, 4])


def batches_of(case: str, documents: bool | str = False) -> list[Batch]:
    return [with_images(sample_batch(list(ids), documents), list(ids), CASES[case].media) for ids in IDS]


def transformers_model(case: str):
    import transformers

    torch.manual_seed(0)
    keys = to_hf(CASES[case], torch.float64)
    name = keys["architectures"][0]
    config = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))(**keys)
    if CASES[case].routed_experts:
        config.text_config._experts_implementation = "eager"
    made = getattr(transformers, name)(config).double().eval()
    with torch.no_grad():
        for path, p in made.named_parameters():
            ones = p.dim() == 1 and path.endswith("weight")
            p.normal_(0.0, 0.2).add_(1.0 if ones else 0.0)
    return made


def saved_names(case: str, model) -> dict[str, torch.nn.Parameter]:
    found = dict(model.named_parameters())
    if case.startswith("qwen2_5_vl"):
        today = {"model.language_model.": "model.", "model.visual.": "visual."}
        found = {
            next((now + n.removeprefix(old) for old, now in today.items() if n.startswith(old)), n): p
            for n, p in found.items()
        }
    return found


@contextmanager
def wide():
    """float64 in place of float32, in the shared functions of towers too."""
    for name in ("qwen2_5_vl", "qwen3_vl"):  # `hf_fuzz.wide` changes what is imported
        import_module(f"transformers.models.{name}.modeling_{name}")
    with wide_towers():
        yield


def expert_by_expert(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks of a layer's experts in memory -> the matrices of files."""
    found = {}
    for name, stack in tensors.items():
        at, _, kind = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if not at or parts is None:
            found[name] = stack
            continue
        for number, matrix in enumerate(stack):
            split = np.split(matrix, len(parts))
            found |= {f"{at}.experts.{number}.{part}.weight": each for part, each in zip(parts, split)}
    return found


@lru_cache
def truth_of(case: str) -> dict:
    with wide():
        return computed_truth(case)


def inputs_of(case: str, tokens: torch.Tensor, sample: int) -> dict:
    """What transformers is given: patches in the order of reading, without windows."""
    model = CASES[case]
    form = replace(model.patch_form, window=None)
    units = images_of(sample, form, sizes_of(model.media), tokens.shape[1] - 4)
    found = {"input_ids": tokens, "mm_token_type_ids": (tokens == model.image_token_id).int()}
    if units.sizes:
        firsts = np.cumsum([0, *units.sizes])[:-1]
        grids = [[1, *units.coordinates[at, 2:4].tolist()] for at in firsts]
        found |= {"pixel_values": torch.from_numpy(units.values).double(), "image_grid_thw": torch.tensor(grids)}
    return found


def computed_truth(case: str) -> dict:
    theirs, loss, count, logits, positions = transformers_model(case), 0.0, 0, [], []
    for ids, batch in zip(IDS, batches_of(case)):
        for row, sample in enumerate(ids):
            inputs = inputs_of(case, batch.tokens.view(len(ids), -1)[row][None], sample)
            logits.append(theirs(**inputs).logits[0])
            grids = inputs.get("image_grid_thw")
            found, _ = theirs.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], grids)
            positions.append(found[:, 0].t())
        loss = loss + F.cross_entropy(
            torch.cat(logits[-len(ids) :]), batch.labels, ignore_index=IGNORE, reduction="sum"
        )
        count += int((batch.labels != IGNORE).sum())
    (loss / count).backward()
    named = saved_names(case, theirs)
    return {
        "weights": expert_by_expert({k: p.detach().numpy() for k, p in named.items()}),
        "grads": expert_by_expert({k: p.grad.numpy() for k, p in named.items()}),
        "logits": torch.cat(logits).detach().numpy(),
        "loss": (loss / count).item(),
        "positions": torch.cat(positions),
    }


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_positions_are_those_of_transformers(case):
    ours = torch.cat([batch.coordinates for batch in batches_of(case)])
    assert torch.equal(ours, truth_of(case)["positions"]) and (ours[:, 1] != ours[:, 2]).any()


@pytest.mark.parametrize("case, layout", SHOWN)
def test_equal_to_transformers(ranks, case, layout):
    truth, model = truth_of(case), CASES[case]
    results = results_of(ranks, model, LAYOUTS[layout], truth["weights"], batches_of(case))
    for result in results:
        assert result["loss"] == pytest.approx(truth["loss"], rel=1e-12)
    if LAYOUTS[layout].get("cp", 1) == 1:
        for found in (np.concatenate(r["logits"]) for r in results if r["logits"]):
            assert np.abs(found - truth["logits"]).max() <= 1e-10 * np.abs(truth["logits"]).max()
    compare_gradients(assemble([r["grads"] for r in results]), truth["grads"])


@pytest.mark.parametrize("case", CASES)
def test_config_json_in_both_directions(case):
    written = json.loads(json.dumps(to_hf(CASES[case], torch.float32, {"pad_token_id": 0})))
    found = from_hf(written)
    assert resolved(vars(found)) == resolved(vars(CASES[case]))
    assert to_hf(found, torch.float32, {"pad_token_id": 0}) == written


def test_older_folders_have_the_text_beside_the_tower():
    keys = to_hf(CASES["qwen2_5_vl"], torch.float32)
    text = keys.pop("text_config")
    section = text.pop("rope_parameters")["mrope_section"]
    del text["model_type"]
    old = {**keys, **text, "rope_theta": 100.0, "rope_scaling": {"type": "mrope", "mrope_section": section}}
    assert resolved(vars(from_hf(old))) == resolved(vars(CASES["qwen2_5_vl"]))


@pytest.mark.parametrize(
    ("case", "at", "changed", "said"),
    [
        ("qwen2_5_vl", "vision_config", {"hidden_act": "gelu"}, "vision_config: hidden_act='gelu'"),
        ("qwen2_5_vl", "vision_config", {"in_channels": 4}, "vision_config: in_channels=4"),
        ("qwen2_5_vl", "vision_config", {"out_hidden_size": 8}, "vision_config: out_hidden_size=8"),
        ("qwen2_5_vl", "vision_config", {"fullatt_block_indexes": [9]}, "must be ascending numbers of layers"),
        ("qwen3_vl", "vision_config", {"num_position_embeddings": 10}, "must be a square number"),
        ("qwen3_vl", "vision_config", {"depth": None}, "depth=None"),
        ("qwen3_vl", "text_config", {"hidden_act": "gelu"}, "text_config: hidden_act='gelu'"),
        ("qwen3_vl", "text_config", {"rope_parameters": {"mrope_section": [1, 1, 1]}}, "must be three numbers"),
        ("qwen3_vl", "text_config", {"rope_parameters": {"mrope_section": "a"}}, "mrope_section='a'"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_named(case, at, changed, said):
    keys = to_hf(CASES[case], torch.float32)
    with pytest.raises(CheckpointError, match=said):
        from_hf({**keys, at: {**keys[at], **changed}})


@pytest.mark.parametrize(
    ("case", "layout"), [("qwen2_5_vl", "pp2"), ("qwen3_vl", "tp2"), ("qwen3_5", "pp2"), ("qwen3_5_moe", "tp2")]
)
def test_a_folder_there_and_back_is_the_same_to_the_byte(ranks, tmp_path, case, layout):
    """Saved by transformers, read, saved in a layout and exported; transformers then finds all it looks for and nothing
    else."""
    theirs = transformers_model(case).float()
    theirs.save_pretrained(tmp_path / "theirs")
    model = model_config_from_hf(tmp_path / "theirs")
    assert resolved(vars(model)) == resolved(vars(CASES[case]))
    run = run_of(model, LAYOUTS[layout], precision="fp32")
    ranks.run("tests.models.test_t5:load_and_save", 2, run, tmp_path / "theirs", tmp_path / "run")
    back = export(latest(tmp_path / "run"), tmp_path / "exported", "fp32")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "theirs", back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.numpy().tobytes() == after[name].numpy().tobytes(), name
    _, info = type(theirs).from_pretrained(back, output_loading_info=True)
    assert not any(info.values())


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_an_image_sees_no_other(case):
    """Another image leaves the logits of all samples but its own as they are, to the bit."""
    from tests.models.test_models import run_model

    weights, batches = truth_of(case)["weights"], batches_of(case)
    first = batches[0]
    images = first.beside[PATCHES]
    here = images.samples == 2
    other = replace(images, values=torch.where(here.unsqueeze(1), images.values + 1, images.values))
    before, after = (
        run_model(0, 1, run_of(CASES[case], {}), weights, [each, batches[1]])["logits"][0]
        for each in (first, replace(first, beside={PATCHES: other}))
    )
    mine = (first.samples == 2).numpy()
    assert (before[~mine] == after[~mine]).all() and (before[mine] != after[mine]).any()
