"""Whisper against transformers: logits, loss and every gradient in float64 at several layouts; texts and recordings
that see no other; folders in both directions."""

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

from phalanx.base.errors import CheckpointError, ConfigError
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import from_hf, model_config_from_hf, resolved, to_hf
from phalanx.checkpoint.keep import latest
from phalanx.config.run import Run, TrainConfig
from phalanx.inference.load import refuse_sound
from phalanx.layout.box import Box
from phalanx.layout.config import LayoutConfig
from phalanx.layout.param import Piece
from phalanx.models.whisper import WhisperConfig
from phalanx.nn.initial import Sinusoids
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.frames import FRAMES
from phalanx.sequence.sample import SOUND
from tests.harness.parity import MODELS, SEQ, assemble, base_run, batch_of
from tests.models.test_llava import compare_gradients
from tests.models.test_models import run_model

CASES = {
    "tied, a deeper decoder": MODELS["whisper"],
    "untied, another number of bands": replace(
        MODELS["whisper"], tie_word_embeddings=False, num_decoder_layers=None, num_mel_bins=8
    ),
}
FIRST = "tied, a deeper decoder"
LAYOUTS = {
    "one rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "cp2, heads": {"cp": 2, "cp_ulysses": 2},
    "pp3 x 2 virtual stages": {"pp": 3, "virtual_stages": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
}
SHOWN = [
    *((case, "one rank") for case in CASES),
    *((FIRST, layout) for layout in ("tp2", "pp2", "cp2", "tp2 pp2")),
    ("untied, another number of bands", "pp3 x 2 virtual stages"),
    ("untied, another number of bands", "cp2, heads"),
]
IDS = ([1, 2], [3, 4])


def run_of(model: WhisperConfig, layout: dict, **train) -> Run:
    config = TrainConfig(
        **{"steps": 1, "global_batch": 4, "micro_batch": 2, "seq_length": SEQ, "precision": "fp64"} | train
    )
    base = base_run("whisper")
    return replace(base, model=model, train=config, layout=LayoutConfig(**layout))


def batches_of(model: WhisperConfig) -> list[Batch]:
    run = replace(base_run("whisper"), model=model)
    return [batch_of(run, ids, "packed") for ids in IDS]


def transformers_model(model: WhisperConfig):
    import transformers

    torch.manual_seed(0)
    config = transformers.WhisperConfig(**to_hf(model, torch.float64))
    made = transformers.WhisperForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.requires_grad:
                p.normal_(0.0, 0.3).add_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return made


def frames_of(batch: Batch, document: int, model: WhisperConfig) -> torch.Tensor:
    """(1, bands, frames) of a document's recording, as transformers takes them."""
    sound = batch.beside[SOUND]
    rows = sound.values[sound.documents == document].unflatten(1, (FRAMES, model.num_mel_bins))
    return rows[:, 2:4].flatten(0, 1).t()[None].double()


@lru_cache
def truth_of(case: str) -> dict:
    """Each document alone, the padding's too."""
    model = CASES[case]
    theirs, loss, count, logits = transformers_model(model), 0.0, 0, []
    for batch in batches_of(model):
        found = torch.empty(batch.num_tokens, model.vocab_size, dtype=torch.float64)
        for document in batch.documents.unique().tolist():
            here = batch.documents == document
            out = theirs(input_features=frames_of(batch, document, model), decoder_input_ids=batch.tokens[here][None])
            found[here] = out.logits[0]
        loss = loss + F.cross_entropy(found, batch.labels, ignore_index=IGNORE, reduction="sum")
        count += int((batch.labels != IGNORE).sum())
        logits.append(found)
    (loss / count).backward()
    named = dict(theirs.named_parameters())
    return {
        "weights": {k: p.detach().numpy() for k, p in named.items()},
        "grads": {k: p.grad.numpy() for k, p in named.items() if p.grad is not None},
        "logits": torch.cat(logits).detach().numpy(),
        "loss": (loss / count).item(),
    }


def results_of(ranks, model: WhisperConfig, layout: dict, weights: dict, batches: list[Batch]) -> list[dict]:
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
    grads = assemble([r["grads"] for r in results])
    assert "model.encoder.embed_positions.weight" not in grads
    compare_gradients(grads, truth["grads"])


@pytest.mark.parametrize("side", ["text", "sound"])
def test_a_document_sees_no_other(side):
    """Other tokens in one packed document, or other frames in its recording, leave the logits of all others as they
    are, to the bit."""
    model, weights = CASES[FIRST], truth_of(FIRST)["weights"]
    batches = batches_of(model)
    first = batches[0]
    here = first.documents == 1
    if side == "text":
        other = replace(first, tokens=torch.where(here, (first.tokens + 7) % model.vocab_size, first.tokens))
    else:
        sound = first.beside[SOUND]
        values = torch.where((sound.documents == 1).unsqueeze(1), sound.values + 1, sound.values)
        other = replace(first, beside={SOUND: replace(sound, values=values)})
    run = run_of(model, {})
    before, after = (run_model(0, 1, run, weights, [each, batches[1]])["logits"][0] for each in (first, other))
    here = here.numpy()
    assert (before[~here] == after[~here]).all() and (before[here] != after[here]).any()


@pytest.mark.parametrize("case", CASES)
def test_config_json_in_both_directions(case):
    written = json.loads(json.dumps(to_hf(CASES[case], torch.float32, {"pad_token_id": 0})))
    found = from_hf(written)
    assert resolved(vars(found)) == resolved(vars(CASES[case]))
    assert to_hf(found, torch.float32, {"pad_token_id": 0}) == written


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"activation_function": "relu"}, "activation_function='relu'"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1"),
        ({"decoder_ffn_dim": 7}, "decoder_ffn_dim=7 \\(supported: encoder_ffn_dim\\)"),
        ({"decoder_attention_heads": 2}, "decoder_attention_heads=2"),
        ({"scale_embedding": True}, "scale_embedding=True"),
        ({"apply_spec_augment": True}, "apply_spec_augment=True"),
        ({"decoder_layers": None}, "decoder_layers=None"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_named(changed, said):
    with pytest.raises(CheckpointError, match=said):
        from_hf({**to_hf(MODELS["whisper"], torch.float32), **changed})


def test_fixed_positions_are_those_of_transformers():
    from transformers.models.whisper.modeling_whisper import sinusoids as theirs

    found, shape = torch.empty(30, 12), (30, 12)
    every = Box.full(shape)
    Sinusoids().fill(found, Piece("positions", shape, every, every.slices(), Sinusoids()), 0)
    assert torch.equal(found, theirs(30, 12))


@pytest.mark.parametrize(("case", "layout"), [(FIRST, "pp2"), ("untied, another number of bands", "tp2")])
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
    again, info = transformers.WhisperForConditionalGeneration.from_pretrained(back, output_loading_info=True)
    assert not any(info.values())
    assert again.generation_config.decoder_start_token_id == model.decoder_start_token_id


def test_what_gives_it_no_recording_is_refused_by_name():
    with pytest.raises(ConfigError, match="whisper.*hears a recording, which a chat does not give it: phalanx gen"):
        refuse_sound(MODELS["whisper"], "a chat")
    refuse_sound(MODELS["t5"], "a chat")
