"""`make train`: a small Llama learns a real text on whatever this machine has, then generates a sample and shows its
report.

    python -m phalanx.cli.demo [--text PATH] [--dir FOLDER] [a.b=c ...]
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from phalanx.base.errors import DataError
from phalanx.cli.main import guarded
from phalanx.cli.ranks import run_ranks
from phalanx.cli.setup import arguments, prepare
from phalanx.config.run import Run, TrainConfig
from phalanx.data.loader import valid_loaders
from phalanx.training.machine import describe_machine

PROMPT = "def main(argv=None):\n"  # of the standard library's source; a text of one's own begins its sample itself
OPENING = 8  # tokens of that beginning
VOCABULARY = 4096


def layout_for(ranks: int) -> dict[str, int]:
    """tp=2, pp=2 and the rest data parallel, as far as the number of ranks allows."""
    return {"tp": 2 if ranks % 2 == 0 else 1, "pp": 2 if ranks % 4 == 0 else 1}


def settings(gpu: bool, ranks: int) -> dict[str, Any]:
    """The demo's run: minutes on two cores; larger on GPUs."""
    layout = layout_for(ranks)
    if gpu:
        sizes = (768, 2048, 12, 12, 4)
        train: dict[str, Any] = {
            "steps": 600,
            "global_batch": 64,
            "micro_batch": 8,
            "seq_length": 512,
            "precision": "bf16",
            "device": "cuda",
        }
        dp = ranks // (layout["tp"] * layout["pp"])
        train["global_batch"] = -(-64 // (8 * dp)) * 8 * dp
    else:
        sizes = (128, 384, 6, 4, 2)
        train = {
            "steps": 250,
            "global_batch": 16,
            "micro_batch": 4,
            "seq_length": 128,
            "precision": "fp32",
            "device": "cpu",
        }
    every = train["steps"] // 5
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    model = dict(zip(names, sizes))
    return {
        "model": {"family": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": train["seq_length"], **model},
        "train": {**train, "eval_interval": every, "eval_samples": 32},
        "layout": layout,
        "optim": {"lr": 1e-3 if gpu else 3e-3, "min_lr": 1e-4, "warmup_steps": train["steps"] // 20},
        "checkpoint": {"interval": every},
        "log": {"report": False},  # written at the end, with a sample
    }


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--text", default=None, help="A file or folder of text; without it, the source of Python's standard library."
)
@click.option("--dir", "folder", default="runs/demo", show_default=True, help="The run's folder.")
@click.argument("overrides", nargs=-1)
def demo(text: str | None, folder: str, overrides: tuple[str, ...]) -> None:
    from phalanx.config.read import load_run
    from phalanx.config.write import save_run
    from phalanx.text.prepare import demo_data

    machine = describe_machine("auto")
    gpu = machine.device == "cuda"
    ranks = machine.device_count or 1 if gpu else 4
    began = time.perf_counter()
    click.echo(f"prepare {text or 'the source of the standard library of this Python'}")
    prefix, tokenizer = demo_data(Path(folder) / "data", [text] if text else None, vocab_size=VOCABULARY)
    click.echo(f"prepared {prefix} in {time.perf_counter() - began:.1f} s")
    values = {
        **settings(gpu, ranks),
        "dir": folder,
        "data": {"paths": [str(prefix)], "split": "99,1,0", "tokenizer": str(tokenizer)},
    }
    config = Path(folder) / "demo.yaml"
    save_run(with_validation_if_possible(load_run(base=values)), config)
    ready = prepare(str(config), overrides, ranks)
    command = shlex.join(["python", "-m", "phalanx.cli.demo", *sys.argv[1:]])
    run_ranks("phalanx.cli.jobs:train", ready, {**arguments(ready.run), "command": command}, None)
    finish(Path(folder), opening(prefix, tokenizer) if text else PROMPT)


def opening(prefix: str, tokenizer: str) -> str:
    """How the last document of the text begins."""
    from phalanx.data.index import Corpus
    from phalanx.text.tokenizers import load_tokenizer

    corpus = Corpus(prefix)
    start = corpus.document_start(corpus.num_documents - 1)
    tokens = corpus.tokens(start, min(start + OPENING, corpus.num_tokens))
    text = load_tokenizer(tokenizer).decode(tokens.tolist(), skip_special_tokens=True)
    return text.rstrip("\ufffd")  # of a character whose other tokens were cut off


def with_validation_if_possible(run: Run) -> Run:
    """Corpora are cut at document borders, so a text that is one long document leaves nothing to validate on."""
    try:
        valid_loaders(run.data, seq_length=run.train.seq_length, seed=run.train.seed, vocab_size=run.model.vocab_size)
        return run
    except DataError:
        click.echo("no validation loss: the text has too few documents (files) to keep some of them apart")
        train = replace(run.train, eval_interval=None, eval_samples=TrainConfig.eval_samples)
        return replace(run, train=train, data=replace(run.data, split="1,0,0"))


def finish(folder: Path, prompt: str) -> None:
    """A sample of the model's text, and where the report is."""
    from phalanx.inference.generate import generate
    from phalanx.inference.request import SamplingOptions
    from phalanx.observe.report import write_report

    text = generate(str(folder), prompt, SamplingOptions(tokens=96, temperature=0.8))
    click.echo(f"\n--- text made by the model ---\n{text}\n---")
    click.echo(f"report {write_report(folder, sample=text)}")


if __name__ == "__main__":
    sys.exit(guarded(lambda: demo.main(standalone_mode=False)))
