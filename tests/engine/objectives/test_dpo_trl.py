"""dpo against TRL's DPOTrainer with PEFT's LoRA on the models of transformers, in fp32: loss, rewards, margins,
accuracies and the gradients of A and B, of the same pairs, weights and adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
import trl

from phalanx.base.rng import fill_normal_
from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.engine.build import State, write_slot
from phalanx.engine.step import accumulate, update
from phalanx.forecast.data_table import open_loaders
from phalanx.nn.adapter import find_adapter
from phalanx.text.cache import use_text
from tests.engine.objectives.test_dpo import dpo
from tests.harness.parity import assemble, base_run, parts_of
from tests.models.test_models import hf_config
from tests.models.test_peft import adapters_of, read_by_peft, save_to, start
from tests.models.test_twenty_steps import MODELS, random_model

VOCAB = MODELS["llama"].vocab_size
PAIRS = 4


def pairs(seed: int = 0) -> list[dict[str, list[int]]]:
    """Of different lengths."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(1, VOCAB, rng.integers(low, high)).tolist()

    return [{"prompt_ids": ids(1, 6), "chosen_ids": ids(1, 8), "rejected_ids": ids(2, 9)} for _ in range(PAIRS)]


def run_of(folder: Path, loss: str, smoothing: float) -> Run:
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs()))
    base = base_run("llama", global_batch=PAIRS, steps=1, seq_length=32, precision="fp32")
    data = DataConfig(pairs=(str(folder / "pairs.jsonl"),), split="100,0,0")
    task = dpo(loss=loss, beta=0.3, label_smoothing=smoothing)
    lora = find_adapter("lora").Config(method="lora", rank=3, alpha=5.0)
    run = replace(base, model=MODELS["llama"], task=task, lora=lora, data=data, dir=str(folder / "run"))
    return replace(run, data=use_text(run.data, run.dir, VOCAB, say=lambda line: None))


def theirs(model: torch.nn.Module, folder: Path, loss: str, smoothing: float) -> tuple[Any, dict[str, torch.Tensor]]:
    """TRL's trainer, and a batch of all pairs."""
    args = trl.DPOConfig(
        output_dir=str(folder / "trl"),
        beta=0.3,
        loss_type=[loss],
        label_smoothing=smoothing,
        per_device_train_batch_size=PAIRS,
        max_length=None,
        report_to="none",
        use_cpu=True,
        gradient_checkpointing=False,
        bf16=False,
        dataloader_pin_memory=False,
    )
    text = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * PAIRS
    trainer = trl.DPOTrainer(model, args=args, train_dataset=datasets.Dataset.from_list(text), processing_class=words())
    trainer.model.delete_adapter("ref")  # of an adapter that exists it makes the reference; ours is the base
    collate = trl.trainer.dpo_trainer.DataCollatorForPreference(pad_token_id=0)
    return trainer, collate(pairs())


def words() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that the trainer wants and the batch does not need."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4, "<unk>": 5}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def random_adapters(state: State) -> None:
    """So that the policy is not the reference."""
    for holder in state.buffers.holders:
        for slot in (slot for slot in holder.bucket.slots if slot.spec.learns):
            storage = torch.zeros(slot.spec.shape, dtype=holder.values_dtype)
            for piece in slot.spec.pieces:
                fill_normal_(piece.of(storage), 0.3, piece.shape, piece.box.start, 7, piece.name)
            write_slot(holder, slot, storage)
    state.buffers.publish()


@pytest.mark.parametrize("loss, smoothing", [("sigmoid", 0.0), ("hinge", 0.0)])
def test_loss_rewards_and_gradients_are_trls(loss, smoothing, tmp_path):
    run, model = run_of(tmp_path, loss, smoothing), random_model(MODELS["llama"])
    state = start(run, model)
    random_adapters(state)
    folder = save_to(state, tmp_path, 0)
    loader = open_loaders(run, run.data)[0]
    tokens = accumulate(state, [loader.batch([number]) for number in range(loader.num_samples)])
    grads = assemble([parts_of(state, "grad")])
    found = update(state, tokens, 0.0)
    assert tokens == PAIRS and 1 < loader.num_samples < PAIRS, "some sequences hold several pairs"
    narrow = transformers.LlamaForCausalLM(hf_config(MODELS["llama"])).float().eval()
    narrow.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    model = read_by_peft(narrow, folder)
    trainer, batch = theirs(model, tmp_path, loss, smoothing)
    expected = trainer.compute_loss(trainer.model, batch)
    expected.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["eval"].items()}
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, name in {
        "rewards_chosen": "rewards/chosen",
        "rewards_rejected": "rewards/rejected",
        "rewards_margin": "rewards/margins",
        "rewards_accuracy": "rewards/accuracies",
    }.items():
        assert found.metrics[ours].item() == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), name
    mine = adapters_of(trainer.model)
    assert mine.keys() == grads.keys()
    largest = max(p.grad.abs().max().item() for p in mine.values())
    assert largest > 1e-4
    for name, p in mine.items():
        np.testing.assert_allclose(grads[name], p.grad, rtol=0, atol=1e-5 * largest, err_msg=name)
