"""sft against TRL's SFTTrainer on a model of transformers, in fp32: loss and gradients of the same chats and
weights."""

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
from tokenizers import Tokenizer

from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.engine.step import accumulate, update
from phalanx.forecast.data_table import open_loaders
from phalanx.models.llama import LlamaConfig
from phalanx.text.cache import use_text
from phalanx.text.tokenizers import train_bpe
from tests.engine.objectives.test_sft import sft
from tests.harness.parity import assemble, base_run, parts_of
from tests.models.test_models import hf_config
from tests.models.test_peft import start
from tests.models.test_twenty_steps import random_model

MODEL = LlamaConfig(
    vocab_size=384,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
)
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>"]
WORDS = ["how many words has this question? it has as many words as an answer has letters.\n"] * 20
LENGTHS = (3, 1, 5, 2, 4, 7)


def folder_of(root: Path, template: str) -> tuple[str, transformers.PreTrainedTokenizerFast]:
    """A tokenizer with a chat template, as both sides read it."""
    train_bpe(WORDS, 320, root)
    core = Tokenizer.from_file(str(root / "tokenizer.json"))
    core.add_special_tokens(SPECIAL)
    text = (TEMPLATES / f"{template}.jinja").read_text()
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "bos_token": "<|endoftext|>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=core, chat_template=text, **names)
    theirs.save_pretrained(root)
    return str(root), transformers.AutoTokenizer.from_pretrained(root)


def question(length: int) -> dict[str, str]:
    return {"role": "user", "content": "how many words has this " + "question " * length + "?"}


def answer(length: int) -> dict[str, str]:
    return {"role": "assistant", "content": "it has " + "as many " * length + "letters."}


CHATS = [{"messages": [question(n), answer(n), question(n + 1), answer(n // 2)]} for n in LENGTHS]
TURNS = [{"prompt": [question(n), answer(n), question(1)], "completion": [answer(n // 2)]} for n in LENGTHS]
TEXTS = [
    {"prompt": f"how many words? {'it has ' * n}", "completion": " as many letters." * (n // 2 + 1)} for n in LENGTHS
]


def run_of(folder: Path, tokenizer: str, records: list[dict[str, Any]]) -> Run:
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    base = base_run("llama", global_batch=4, steps=1, seq_length=512, precision="fp32")
    data = DataConfig(chats=(str(folder / "chats.jsonl"),), tokenizer=tokenizer, split="100,0,0")
    run = replace(base, model=MODEL, task=sft(), data=data, dir=str(folder / "run"))
    data = use_text(run.data, run.dir, MODEL.vocab_size, train_on="answers", say=lambda line: None)
    return replace(run, data=data)


def theirs_of(folder: Path, model: Any, tokenizer: Any, records: list[dict[str, Any]], **fields: Any) -> torch.Tensor:
    """The loss of all records as one batch of TRL's trainer; gradients are in the model."""
    args = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=len(records),
        max_length=None,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        **fields,
    )
    given = datasets.Dataset.from_list(records)
    trainer = trl.SFTTrainer(model, args=args, train_dataset=given, processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(records))])
    loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
    loss.backward()
    return loss


@pytest.mark.parametrize(
    "records, template, fields",
    [(CHATS, "qwen2_5_training", {"assistant_only_loss": True}), (TURNS, "llama3", {}), (TEXTS, "llama3", {})],
    ids=["messages", "prompt and completion", "texts"],
)
def test_loss_and_gradients_are_trls(records, template, fields, tmp_path):
    """Where the template marks answers, where it does not, and without it. TRL trains what a template writes after the
    end of an answer too, such as ChatML's line break: the second template writes nothing there."""
    (tmp_path / "tokenizer").mkdir()
    name, tokenizer = folder_of(tmp_path / "tokenizer", template)
    run, model = run_of(tmp_path, name, records), random_model(MODEL)
    state = start(run, model)
    loader, _ = open_loaders(run, run.data)
    tokens = accumulate(state, [loader.batch([number]) for number in range(loader.num_samples)])
    grads = assemble([parts_of(state, "grad")])
    found = update(state, tokens, 0.0)
    assert loader.num_samples < len(records), "some sequences hold several chats"
    narrow = transformers.LlamaForCausalLM(hf_config(MODEL)).float()
    narrow.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    expected = theirs_of(tmp_path, narrow, tokenizer, records, **fields)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    mine = {name: p.grad for name, p in narrow.named_parameters()}
    assert mine.keys() == grads.keys()
    largest = max(grad.abs().max().item() for grad in mine.values())
    for name, grad in mine.items():
        np.testing.assert_allclose(grads[name], grad, rtol=0, atol=1e-5 * largest, err_msg=name)
