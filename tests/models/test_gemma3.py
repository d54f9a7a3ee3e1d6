"""Gemma 3 with images against transformers: logits, loss and every gradient in float64 at several layouts; images and
documents that see no other; folders in both directions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import from_hf, model_config_from_hf, resolved, to_hf
from phalanx.checkpoint.keep import latest
from phalanx.models.gemma3 import BEGIN, END, IMAGE, Gemma3Config
from phalanx.nn.attention import whole_only
from phalanx.ops.attention.kind import AttentionKind, UnsupportedAttention
from phalanx.planning.blocks import make_blocks
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.patches import PATCHES
from tests.harness.hf_fuzz import wide
from tests.harness.parity import MODELS, assemble
from tests.models.test_llava import IDS, batches_of, compare_gradients, pixels_in, run_of, saved_names
from tests.models.test_models import run_model

FIRST = "windows narrower than an image"
CASES = {
    FIRST: MODELS["gemma3"],
    "untied, patches of their own, a pooling head": replace(
        MODELS["gemma3"],
        tie_word_embeddings=False,
        mm_tokens_per_image=4,
        vision=replace(MODELS["gemma3"].vision, image_size=6, pooling_head=True),
        sliding_window=7,
    ),
}
LAYOUTS = {
    "one rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2, ring": {"cp": 2, "cp_attention": "ring"},
    "cp2, all-gather": {"cp": 2, "cp_attention": "allgather"},
    "cp2, heads": {"cp": 2, "cp_ulysses": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
}
SHOWN = [
    *((case, "one rank") for case in CASES),
    *((FIRST, layout) for layout in LAYOUTS if layout not in ("one rank", "tp2 pp2")),
    ("untied, patches of their own, a pooling head", "tp2 pp2"),
]


def transformers_model(model: Gemma3Config):
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma3Config(**to_hf(model, torch.float64))
    made = transformers.Gemma3ForConditionalGeneration(config).double().eval()
    if not model.tie_word_embeddings:
        made.lm_head.weight = torch.nn.Parameter(torch.empty_like(made.lm_head.weight))
    with torch.no_grad():
        for name, p in made.named_parameters():
            offset = 1.0 if "vision_tower" in name and "norm" in name and name.endswith("weight") else 0.0
            p.normal_(0.0, 0.2).add_(offset)
    return made


@lru_cache
def truth_of(case: str) -> dict:
    with wide():  # transformers has norms and angles in float32
        return computed_truth(CASES[case])


def computed_truth(model: Gemma3Config) -> dict:
    theirs, loss, count, logits = transformers_model(model), 0.0, 0, []
    for ids, batch in zip(IDS, batches_of(model)):
        for row, images in enumerate(pixels_in(batch, model, ids)):
            tokens = batch.tokens.view(len(ids), -1)[row][None]
            types = (tokens == model.image_token_id).long()
            pixels = {"pixel_values": images} if len(images) else {}
            logits.append(theirs(input_ids=tokens, token_type_ids=types, **pixels).logits[0])
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


def results_of(ranks, model: Gemma3Config, layout: dict, weights: dict, batches: list[Batch]) -> list[dict]:
    world = math.prod(v for k, v in layout.items() if k in ("tp", "pp", "cp"))
    arguments = run_of(model, layout), weights, batches
    if world == 1:
        return [run_model(0, 1, *arguments)]
    return ranks.run("tests.models.test_models:run_model", world, *arguments)


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


def test_packed_documents_and_images_see_no_other():
    """Another image leaves all other documents' logits as they are, to the bit, and changes those of its own tokens,
    the first of which read the last."""
    model, weights = CASES[FIRST], truth_of(FIRST)["weights"]
    batches = batches_of(model, "packed")
    first, run = batches[0], run_of(model, {})
    images = first.beside[PATCHES]
    here = (images.documents == 1) & images.real.bool()
    owner = int(images.samples[here][0])
    at_images = first.tokens == model.image_token_id
    documents = first.documents[at_images & (first.samples == owner)].unique()
    other = replace(images, values=torch.where(here.unsqueeze(1), images.values + 1, images.values))
    before, after = (
        run_model(0, 1, run, weights, [each, batches[1]])["logits"][0]
        for each in (first, replace(first, beside={PATCHES: other}))
    )
    spans = torch.isin(first.documents, documents).numpy()
    assert (before[~spans] == after[~spans]).all() and (before[spans] != after[spans]).any()


def test_the_first_token_of_an_image_reads_its_last():
    """In one layer: with another token in the place of an image's last, what stands at its first changes, and nothing
    before it."""
    model = replace(CASES[FIRST], num_hidden_layers=1, layer_types=("full_attention",))
    upper = tuple(f"language_model.model.layers.{i}." for i in (1, 2))
    weights = {name: w for name, w in truth_of(FIRST)["weights"].items() if not name.startswith(upper)}
    batches, run = batches_of(model), run_of(model, {})
    first = batches[0]
    place = int((first.tokens == model.image_token_id).nonzero()[0])
    tokens = first.tokens.clone()
    tokens[place + 3] = 11
    found, other = (
        run_model(0, 1, run, weights, [each, batches[1]])["logits"][0]
        for each in (first, replace(first, tokens=tokens))
    )
    assert (found[:place] == other[:place]).all() and (found[place] != other[place]).any()


@pytest.mark.parametrize("case", CASES)
def test_config_json_in_both_directions(case):
    written = json.loads(json.dumps(to_hf(CASES[case], torch.float32, {"pad_token_id": 0})))
    found = from_hf(written)
    assert resolved(vars(found)) == resolved(vars(CASES[case]))
    assert to_hf(found, torch.float32, {"pad_token_id": 0}) == written


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mm_tokens_per_image": 5}, "must be a square number"),
        ({"mm_tokens_per_image": 9}, "must be a square number whose root divides"),
        ({"image_token_index": 262144}, "image_token_id.*must be a token of the vocabulary"),
        ({"vision_config": {"model_type": "pixtral"}}, "vision_config: model_type='pixtral'"),
        ({"text_config": None}, "text_config=None"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_named(changed, said):
    with pytest.raises(CheckpointError, match=said):
        from_hf({**to_hf(CASES[FIRST], torch.float32), **changed})


@pytest.mark.parametrize(("case", "layout"), [(FIRST, "pp2"), ("untied, patches of their own, a pooling head", "tp2")])
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
    _, info = transformers.Gemma3ForConditionalGeneration.from_pretrained(back, output_loading_info=True)
    assert not any(info.values())


def test_a_template_writes_one_token_for_an_image():
    spec = CASES[FIRST].media
    before, after = spec.rewrites
    assert f"a {BEGIN}b".replace(before, after) == f"a \n\n{BEGIN}{IMAGE}{END}\n\nb"
    assert spec.form.tokens(12, 12) == 4 and spec.form.rows(12, 12) == 16


def test_what_lacks_such_attention_says_so():
    assert whole_only(AttentionKind(together=7)) is None  # what is remembered is read so
    from phalanx.nn.env import Env, OpChoices

    for kernels in ("optional", "invariant"):
        env = Env(ops=OpChoices(kernels=kernels)) if kernels == "optional" else Env(ops=OpChoices(batch_invariant=True))
        with pytest.raises(UnsupportedAttention, match="has no (together|.*, no together)"):
            make_blocks(CASES[FIRST], env, range(4, 5))
