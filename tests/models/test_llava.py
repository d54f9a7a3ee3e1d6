"""LLaVA against transformers: logits, loss and every gradient in float64 at several layouts; images and documents that
see no other; folders in both directions; a frozen tower."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.checkpoint.hf import to_hf
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.llava import LlavaConfig
from phalanx.models.vision_config import VisionConfig
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.patches import PATCHES
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
    side = model.vision.image_size
    form, token = model.patch_form, model.image_token_id
    return [with_images(sample_batch(list(each), documents), list(each), form, token, [(side, side)]) for each in ids]


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
    return ranks.run("tests.models.test_llava:run_cut", world, *arguments)


def run_cut(rank: int, world: int, run: Run, weights: dict, batches: list[Batch]) -> dict:
    """As run_model, of this rank's shards of the batches."""
    from phalanx.comm.mesh import Mesh
    from phalanx.forecast.decide import make_plan

    part = Mesh(make_plan(run, world).grid, rank).part
    return run_model(rank, world, run, weights, [batch.cut(part) for batch in batches])


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
