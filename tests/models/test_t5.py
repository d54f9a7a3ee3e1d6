"""T5 against transformers: logits, loss and every gradient in float64 at several layouts; documents of a packed
micro-batch against each of them alone; folders in both directions."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import from_hf, model_config_from_hf, resolved, to_hf
from phalanx.checkpoint.keep import latest
from phalanx.checkpoint.load import load_weights
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.engine.build import build
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.sequence.batch import ENCODER, IGNORE, Batch
from tests.harness.checkpoints import save_here
from tests.harness.parity import ENCODER_SEQ, MODELS, SEQ, assemble, base_run, batch_of, task_of
from tests.models.test_models import run_model

CASES = {
    "1.1: gated, untied, a deeper decoder": MODELS["t5"],
    "1.0: relu, tied, scaled": MODELS["t5-tied"],
    "tied without scale": replace(MODELS["t5-tied"], scale_decoder_outputs=False),
    "untied with scale, far distances": replace(
        MODELS["t5"], scale_decoder_outputs=True, relative_attention_num_buckets=4, relative_attention_max_distance=16
    ),
}
LAYOUTS = {
    "one rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp3 x 2 virtual stages": {"pp": 3, "virtual_stages": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "cp2": {"cp": 2},
}
SHOWN = [
    *((case, "one rank") for case in CASES),
    ("1.1: gated, untied, a deeper decoder", "tp2"),
    ("1.1: gated, untied, a deeper decoder", "pp2"),
    ("1.0: relu, tied, scaled", "pp3 x 2 virtual stages"),
    ("1.0: relu, tied, scaled", "tp2 pp2"),
    pytest.param("1.1: gated, untied, a deeper decoder", "cp2", marks=pytest.mark.soak),
]


def batches_of(case: str, documents: bool | str) -> list[Batch]:
    run = replace(base_run("t5"), model=CASES[case])
    return [batch_of(run, ids, documents) for ids in ([1, 2], [3, 4])]


def transformers_model(case: str):
    """A model of transformers in float64, norms included (their T5LayerNorm has its sums in float32)."""
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(**to_hf(CASES[case], torch.float64))
    config.dropout_rate = 0.0
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    if not CASES[case].tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.3).add_(1.0 if p.dim() == 1 else 0.0)
    for module in model.modules():
        if type(module).__name__ == "T5LayerNorm":
            module.forward = lambda h, m=module: (
                m.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + m.variance_epsilon))
            )
    return model


def document_pairs(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Places of each document's tokens in the decoder's text and in the encoder's."""
    encoder = batch.beside[ENCODER]
    if batch.documents is None:
        rows = (torch.arange(b.num_tokens).view(b.num_sequences, -1) for b in (batch, encoder))
        return list(zip(*rows))
    return [
        ((batch.documents == number).nonzero()[:, 0], (encoder.documents == number).nonzero()[:, 0])
        for number in batch.documents.unique()
    ]


@lru_cache
def truth_of(case: str, documents: bool | str) -> dict:
    """Each document alone."""
    model, loss, count, logits = transformers_model(case), 0.0, 0, []
    for batch in batches_of(case, documents):
        found = torch.empty(batch.num_tokens, CASES[case].vocab_size, dtype=torch.float64)
        for decoder, encoder in document_pairs(batch):
            out = model(
                input_ids=batch.beside[ENCODER].tokens[encoder][None], decoder_input_ids=batch.tokens[decoder][None]
            )
            found[decoder] = out.logits[0]
        loss = loss + F.cross_entropy(found, batch.labels, ignore_index=IGNORE, reduction="sum")
        count += int((batch.labels != IGNORE).sum())
        logits.append(found)
    (loss / count).backward()
    named = dict(model.named_parameters())
    return {
        "weights": {k: p.detach().numpy() for k, p in named.items()},
        "grads": {k: p.grad.numpy() for k, p in named.items()},
        "logits": torch.cat(logits).detach().numpy(),
        "loss": (loss / count).item(),
    }


def compare_with(truth: dict, results: list[dict]) -> None:
    for result in results:
        assert result["loss"] == pytest.approx(truth["loss"], rel=1e-12)
    logits = [(np.concatenate(r["logits"]), truth["logits"][r["places"]]) for r in results if r["logits"]]
    assert logits
    for found, expected in logits:
        assert np.abs(found - expected).max() <= 1e-10 * np.abs(truth["logits"]).max()
    grads = assemble([r["grads"] for r in results])
    assert grads.keys() == truth["grads"].keys()
    largest = max(np.abs(g).max() for g in truth["grads"].values())
    for name, expected in truth["grads"].items():
        off, bound = np.abs(grads[name] - expected).max(), 1e-10 * max(np.abs(expected).max(), 1e-6 * largest)
        assert off <= bound, f"gradient of {name} is off by {off:.3g} (bound {bound:.3g})"


def results_of(ranks, case: str, layout: str, documents: bool | str) -> list[dict]:
    truth, world = truth_of(case, documents), math.prod(v for k, v in LAYOUTS[layout].items() if k != "virtual_stages")
    train = TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp64")
    run = Run(model=CASES[case], train=train, layout=LayoutConfig(**LAYOUTS[layout]), task=task_of(CASES[case]))
    arguments = run, truth["weights"], batches_of(case, documents)
    if world == 1:
        return [run_model(0, 1, *arguments)]
    return ranks.run("tests.models.test_models:run_model", world, *arguments)


@pytest.mark.parametrize("case, layout", SHOWN)
def test_equal_to_transformers(ranks, case, layout):
    compare_with(truth_of(case, False), results_of(ranks, case, layout, False))


@pytest.mark.parametrize("documents", [True, "packed"])
def test_packed_documents_equal_each_alone(ranks, documents):
    case = "1.1: gated, untied, a deeper decoder"
    compare_with(truth_of(case, documents), results_of(ranks, case, "one rank", documents))


@pytest.mark.parametrize("case", CASES)
def test_config_json_in_both_directions(case):
    written = json.loads(json.dumps(to_hf(CASES[case], torch.float32, {"pad_token_id": 0})))
    found = from_hf(written)
    assert to_hf(found, torch.float32, {"pad_token_id": 0}) == written
    assert (found.decoder_layers, found.scales_outputs) == (CASES[case].decoder_layers, CASES[case].scales_outputs)


def changed(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return torch.where(where, (x + 7) % CASES["1.0: relu, tied, scaled"].vocab_size, x)


@pytest.mark.parametrize("side", ["decoder", "encoder"])
def test_a_document_sees_no_other(side):
    """Other tokens in one packed document, or in its encoder's text, leave the logits of all others as they are, to the
    bit."""
    case = "1.0: relu, tied, scaled"
    truth = truth_of(case, "packed")
    batches = batches_of(case, "packed")
    first = batches[0]
    number = int(first.documents[len(first.documents) // 2])
    here = first.documents == number
    if side == "decoder":
        other = replace(first, tokens=changed(first.tokens, here))
    else:
        encoder = first.beside[ENCODER]
        tokens = changed(encoder.tokens, encoder.documents == number)
        other = replace(first, beside={ENCODER: replace(encoder, tokens=tokens)})
    train = TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp64")
    run = Run(model=CASES[case], train=train, task=task_of(CASES[case]))
    before, after = (
        run_model(0, 1, run, truth["weights"], [batch, batches[1]])["logits"][0] for batch in (first, other)
    )
    assert (before[~here] == after[~here]).all() and (before[here] != after[here]).any()
    assert len(after) == 2 * SEQ and other.beside[ENCODER].num_tokens == 2 * ENCODER_SEQ


def load_and_save(rank: int, world: int, run: Run, folder: Path, root: Path) -> None:
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    load_weights(folder, state.buffers, mesh)
    save_here(state, root)


@pytest.mark.parametrize(
    ("case", "layout"), [("1.1: gated, untied, a deeper decoder", "pp2"), ("1.0: relu, tied, scaled", "tp2")]
)
def test_a_folder_there_and_back_is_the_same_to_the_byte(ranks, tmp_path, case, layout):
    """Saved by transformers, read, saved in a layout and exported; transformers then finds all it looks for and nothing
    else."""
    import transformers

    theirs = transformers_model(case).float()
    theirs.save_pretrained(tmp_path / "theirs")
    model = model_config_from_hf(tmp_path / "theirs")
    assert resolved(vars(model)) == resolved(vars(replace(CASES[case], max_position_embeddings=512)))
    train = TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp32")
    run = Run(model=model, train=train, layout=LayoutConfig(**LAYOUTS[layout]), task=task_of(model))
    ranks.run("tests.models.test_t5:load_and_save", 2, run, tmp_path / "theirs", tmp_path / "run")
    back = export(latest(tmp_path / "run"), tmp_path / "exported", "fp32")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "theirs", back))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.numpy().tobytes() == after[name].numpy().tobytes(), name
    again, info = transformers.T5ForConditionalGeneration.from_pretrained(back, output_loading_info=True)
    assert not any(info.values())
    assert again.config.scale_decoder_outputs == CASES[case].scales_outputs
    assert again.generation_config.decoder_start_token_id == CASES[case].decoder_start_token_id  # or `generate` fails
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        found, expected = (m.eval()(input_ids=tokens, decoder_input_ids=tokens).logits for m in (again, theirs))
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-2)
