"""`make train TEXT=file`: from one text file to a checkpoint that transformers loads, a sample and a report."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_one_text_file(warm, tmp_path):
    """The smallest corpus there is: one document, so nothing to validate on."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {i} of a text that is not long: {i * i}.\n" for i in range(800)))
    folder = tmp_path / "run"
    command = [
        warm.python,
        "-m",
        "phalanx.cli.demo",
        "--text",
        str(text),
        "--dir",
        str(folder),
        "train.steps=6",
        "optim.warmup_steps=1",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no validation loss" in done.stdout and "step=6 " in done.stdout
    assert "--- text made by the model ---\nLine 0 of a text" in done.stdout  # begun as the text begins
    assert "text made by the model" in (folder / "report.html").read_text().lower()
    assert "<svg" in (folder / "report.html").read_text()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = folder / "checkpoints" / "step-00000006" / "weights"
    model, info = AutoModelForCausalLM.from_pretrained(weights, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(weights)
    ids = tokenizer("Line 7", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "Line 7"
    assert model(ids).logits.shape[-1] == model.config.vocab_size
