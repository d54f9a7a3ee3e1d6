"""LLaVA against transformers: logits, loss and every gradient in float64 at several layouts; images and documents that
see no other; folders in both directions; a frozen tower."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import from_hf, model_config_from_hf, read_folder, resolved, to_hf
from phalanx.checkpoint.hf_files import adapt, same_in
from phalanx.checkpoint.keep import latest
from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.build import build
from phalanx.engine.step import accumulate
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.llava import LlavaConfig
from phalanx.models.vision_config import VisionConfig
from phalanx.planning.blocks import exported_shapes
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.patches import PATCHES
from phalanx.verifying.compare import random_weights
from tests.harness.hf_fuzz import wide
from tests.harness.parity import MODELS, SEQ, assemble, sample_batch
from tests.harness.pictures import pixels_of, with_images
from tests.models.test_models import run_model

CLIP = MODELS["llava"]
SIGLIP = replace(
    CLIP,
    text_family="qwen2",
    vision=VisionConfig(
        tower="siglip",
        hidden_size=24,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=7,
        patch_size=3,
        hidden_act="gelu_pytorch_tanh",
        pooling_head=True,
    ),
    vision_feature_layer=-1,
    vision_feature_select_strategy="full",
    projector_bias=False,
    tie_word_embeddings=True,
)
CASES = {
    "CLIP and Llama, the last layer but one": CLIP,
    "SigLIP and Qwen2, tied": SIGLIP,
    "CLIP's class token, and Mistral's window": replace(
        CLIP, text_family="mistral", sliding_window=6, vision_feature_select_strategy="full", vision_feature_layer=1
    ),
    "biases of Llama": replace(CLIP, attention_bias=True, mlp_bias=True, vision_feature_layer=-4),
}
FIRST = "CLIP and Llama, the last layer but one"
LAYOUTS = {
    "one rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "pp3 x 2 virtual stages": {"pp": 3, "virtual_stages": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "dp2, ZeRO-3": {"sharding": 3},
}
SHOWN = [
    *((case, "one rank") for case in CASES),
    *((FIRST, layout) for layout in ("tp2", "pp2", "cp2", "tp2 cp2")),
    ("SigLIP and Qwen2, tied", "pp3 x 2 virtual stages"),
    ("SigLIP and Qwen2, tied", "tp2"),
]
IDS = ([1, 2], [3, 4])  # of samples: with one image, one, two, and none


def run_of(model: LlavaConfig, layout: dict, **train) -> Run:
    config = TrainConfig(
        **{"steps": 1, "global_batch": 4, "micro_batch": 2, "seq_length": SEQ, "precision": "fp64"} | train
    )
    data = DataConfig(mock=True, room={PATCHES: 40})
    return Run(model=model, train=config, layout=LayoutConfig(**layout), data=data)


def batches_of(model: LlavaConfig, documents: bool | str = False, ids=IDS) -> list[Batch]:
    return [with_images(sample_batch(list(each), documents), list(each), model.media) for each in ids]


def transformers_model(model: LlavaConfig):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlavaConfig(**to_hf(model, torch.float64))
    made = transformers.LlavaForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.normal_(0.0, 0.2).add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return made


def saved_names(model) -> dict[str, torch.nn.Parameter]:
    """Parameters under the names of their files."""
    found = {}
    for name, p in model.named_parameters():
        name = name.removeprefix("model.")
        name = name.replace("language_model.", "language_model.model.", 1)
        found["language_model." + name if name.startswith("lm_head") else name] = p
    return found


def pixels_in(batch: Batch, model: LlavaConfig, ids: list[int]) -> list[torch.Tensor]:
    """The images of each sample (n, 3, H, W)."""
    side, owners = model.vision.image_size, batch.beside[PATCHES]
    found = []
    for sample in ids:
        here = owners.documents[(owners.samples == sample) & owners.real.bool()].unique()
        images = [pixels_of(10 * sample + number, side, side) for number in range(len(here))]
        found.append(torch.from_numpy(np.stack(images)).double() if images else torch.empty(0))
    return found


@lru_cache
def truth_of(case: str) -> dict:
    with wide():  # transformers has norms and angles in float32
        return computed_truth(CASES[case])


def computed_truth(model: LlavaConfig) -> dict:
    theirs, loss, count, logits = transformers_model(model), 0.0, 0, []
    for ids, batch in zip(IDS, batches_of(model)):
        for row, images in enumerate(pixels_in(batch, model, ids)):
            tokens = batch.tokens.view(len(ids), -1)[row][None]
            pixels = {"pixel_values": images} if len(images) else {}
            logits.append(theirs(input_ids=tokens, **pixels).logits[0])
        labels = batch.labels
        loss = loss + F.cross_entropy(torch.cat(logits[-len(ids) :]), labels, ignore_index=IGNORE, reduction="sum")
        count += int((labels != IGNORE).sum())
    (loss / count).backward()
    named = saved_names(theirs)
    return {
        "weights": {k: p.detach().numpy() for k, p in named.items()},
        "grads": {k: p.grad.numpy() for k, p in named.items() if p.grad is not None},
        "logits": torch.cat(logits).detach().numpy(),
        "loss": (loss / count).item(),
    }


def results_of(ranks, model: LlavaConfig, layout: dict, weights: dict, batches: list[Batch]) -> list[dict]:
    world = math.prod(v for k, v in layout.items() if k in ("tp", "pp", "cp", "dp"))
    arguments = run_of(model, layout), weights, batches
    if world == 1:
        return [run_model(0, 1, *arguments)]
    return ranks.run("tests.models.test_models:run_model", world, *arguments)


def compare_gradients(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    largest = max(np.abs(g).max() for g in expected.values())
    for name, right in expected.items():
        off, bound = np.abs(found[name] - right).max(), 1e-10 * max(np.abs(right).max(), 1e-6 * largest)
        assert off <= bound, f"gradient of {name} is off by {off:.3g} (bound {bound:.3g})"


@pytest.mark.parametrize("case, layout", SHOWN)
def test_equal_to_transformers(ranks, case, layout):
    truth, model = truth_of(case), CASES[case]
    results = results_of(ranks, model, LAYOUTS[layout], truth["weights"], batches_of(model))
    for result in results:
        assert result["loss"] == pytest.approx(truth["loss"], rel=1e-12)
    if LAYOUTS[layout].get("cp", 1) == 1:
        for found in (np.concatenate(r["logits"]) for r in results if r["logits"]):
            assert np.abs(found - truth["logits"]).max() <= 1e-10 * np.abs(truth["logits"]).max()
    compare_gradients(assemble([r["grads"] for r in results]), truth["grads"])


def test_packed_documents_and_images_see_no_other(ranks):
    """Another image, or other tokens in a packed document, leave all other documents' logits as they are, to the
    bit."""
    model, weights = CASES[FIRST], truth_of(FIRST)["weights"]
    batches = batches_of(model, "packed")
    first = batches[0]
    images = first.beside[PATCHES]
    here = images.documents == 1
    assert images.real[here].all()
    other = replace(images, values=torch.where(here.unsqueeze(1), images.values + 1, images.values))
    owner = int(images.samples[here][0])
    at_images = first.tokens == model.image_token_id
    documents = first.documents[at_images & (first.samples == owner)].unique()
    spans = torch.isin(first.documents, documents)
    run = run_of(model, {})
    before, after = (
        run_model(0, 1, run, weights, [each, batches[1]])["logits"][0]
        for each in (first, replace(first, beside={PATCHES: other}))
    )
    spans = spans.numpy()
    assert (before[~spans] == after[~spans]).all() and (before[spans] != after[spans]).any()


def test_a_frozen_tower_has_no_gradient_and_no_backward(ranks):
    model, truth = CASES[FIRST], truth_of(FIRST)
    run = run_of(model, {}, freeze=["vision_tower.*"])
    result = run_model(0, 1, run, truth["weights"], batches_of(model))
    kept = {name: g for name, g in truth["grads"].items() if not name.startswith("vision_tower.")}
    compare_gradients(assemble([result["grads"]]), kept)
    for frozen in (True, False):
        layout = {"pp": 2, "bucket_mb": 0, "stages": (3, 5)}  # the tower, and the rest
        each = run_of(model, layout, freeze=["vision_tower.*"] if frozen else [])
        found = ranks.run("tests.models.test_llava:backward_of_tower", 2, each)
        assert all((blocks == []) == frozen for blocks, _ in found[:1])
        assert [sent for _, sent in found] == [2, 0 if frozen else 2]


def backward_of_tower(rank: int, world: int, run: Run) -> tuple[list[str], int]:
    """The tower's blocks through which gradients pass on this rank, and messages that it sends: the last rank
    sends gradients."""
    plan = make_plan(run, world)
    state, seen, sent = build(plan, Mesh(plan.grid, rank)), list[str](), list[int]()
    random_weights(state.model)
    stages, real = state.model.stages, Axis.send
    backward = stages.runner.backward

    def watched(where, mb, xs, ys, dys, last):
        seen.extend(type(b).__name__ for b in stages.segments[where] if any(y.requires_grad for y in ys))
        return backward(where, mb, xs, ys, dys, last)

    stages.runner.backward = watched
    Axis.send = lambda axis, x, to: (sent.append(to), real(axis, x, to))[1]
    state.model.train()
    try:
        accumulate(state, batches_of(run.model))
    finally:
        Axis.send = real
    return [name for name in seen if name.startswith("Vision")], len(sent)


@pytest.mark.parametrize("case", CASES)
def test_config_json_in_both_directions(case):
    written = json.loads(json.dumps(to_hf(CASES[case], torch.float32, {"pad_token_id": 0})))
    found = from_hf(written)
    assert resolved(vars(found)) == resolved(vars(CASES[case]))
    assert to_hf(found, torch.float32, {"pad_token_id": 0}) == written


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"projector_hidden_act": "relu"}, "projector_hidden_act='relu'"),
        ({"vision_feature_layer": [-2, -1]}, "vision_feature_layer=\\[-2, -1\\]"),
        ({"vision_feature_layer": -9}, "must name the embedding or a layer of the tower"),
        ({"text_config": {"model_type": "opt"}}, "text_config: model_type='opt'"),
        ({"vision_config": {"model_type": "pixtral"}}, "vision_config: model_type='pixtral'"),
        ({"image_token_index": 32000}, "must be a token of the vocabulary"),
        ({"vision_config": None}, "vision_config=None"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_named(changed, said):
    with pytest.raises(CheckpointError, match=said):
        from_hf({**to_hf(CLIP, torch.float32), **changed})


@pytest.mark.parametrize(("case", "layout"), [(FIRST, "pp2"), ("SigLIP and Qwen2, tied", "tp2")])
def test_a_folder_there_and_back_is_the_same_to_the_byte(ranks, tmp_path, case, layout):
    """Saved by transformers, read, saved in a layout and exported; transformers then finds all it looks for and nothing
    else."""
    import transformers

    theirs = transformers_model(CASES[case]).float()
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
    _, info = transformers.LlavaForConditionalGeneration.from_pretrained(back, output_loading_info=True)
    assert not any(info.values())


def test_former_names_of_published_folders_are_read(tmp_path):
    theirs = transformers_model(CLIP).float()
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {n.replace("vision_tower.", "vision_tower.vision_model.", 1): t for n, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    folder = read_folder(tmp_path)
    found = adapt(folder.index, exported_shapes(folder.model), str(tmp_path), same_in(tmp_path))
    assert found.keys() == exported_shapes(folder.model).keys()
