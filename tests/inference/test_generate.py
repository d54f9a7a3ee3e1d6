"""`phalanx generate`: text as it is made, kept on Ctrl-C, and never past the positions that a model has."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from phalanx.base.errors import ConfigError
from phalanx.inference.generate import TextStream, generate
from phalanx.text.pieces import Pieces
from phalanx.text.tokenizers import load_tokenizer

ROOT = Path(__file__).parents[2]
POSITIONS = 48


@pytest.fixture(scope="module")
def runs(warm, tmp_path_factory):
    """Two runs of a byte model: one with few positions, one with many."""
    folder = tmp_path_factory.mktemp("runs")
    for name, positions in (("short", POSITIONS), ("long", 8192)):
        words = [
            f"dir={folder / name}",
            f"model.max_position_embeddings={positions}",
            "train.seq_length=32",
            "train.steps=1",
            "data.tokenizer=bytes",
        ]
        done = warm.phalanx(
            "train", "recipes/tiny_llama.yaml", *words, "optim.warmup_steps=0", "train.eval_interval=null", cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "text", ["plain words", "h\u00e9llo \u6f22\u5b57 \U0001f642 end", "\U0001f469\u200d\U0001f680"]
)
def test_characters_appear_whole(text):
    """Of a tokenizer whose tokens are bytes, the first bytes of a character show nothing."""
    tokenizer = load_tokenizer("bytes")
    pieces = Pieces(tokenizer)
    shown = [pieces.add(token) for token in tokenizer.encode(text)]
    assert "".join(shown) == text and pieces.rest() == "" and all("\ufffd" not in piece for piece in shown)
    assert len([piece for piece in shown if piece]) == len(text)


def test_bytes_that_are_no_text_are_shown_at_the_end():
    pieces = Pieces(load_tokenizer("bytes"))
    assert pieces.add(0xF0) == "" and pieces.add(ord("a")).endswith("a")
    assert pieces.add(0xF0) == "" and pieces.rest() == "\ufffd" and pieces.rest() == ""


@pytest.mark.trust(
    27, "phalanx generate with more tokens than the model has positions", "stops at the last position and says so"
)
def test_generation_stops_where_positions_end(runs, warm):
    stream = TextStream(str(runs / "short"), "Arma virumque", tokens=1000, seed=1)
    text = "".join(stream)
    prompt = len(load_tokenizer("bytes").encode("Arma virumque"))
    assert stream.notice is None or f"stopped after {POSITIONS - prompt} of 1000 tokens" in stream.notice
    assert (
        len(stream.ids) <= POSITIONS
        and generate(str(runs / "short"), "Arma virumque", tokens=1000, seed=1) == "Arma virumque" + text
    )
    done = warm.phalanx("generate", str(runs / "short"), "--prompt", "Arma", "--tokens", "1000", "--seed", "3")
    assert done.returncode == 0 and done.stdout.startswith("Arma") and "max_position_embeddings" in done.stderr
    few = TextStream(str(runs / "short"), "Arma", tokens=3)
    assert list(few) and few.notice is None and len(few.ids) <= 7


@pytest.mark.trust(
    27,
    "phalanx generate with a prompt longer than the model's positions",
    "exit 2 with both numbers; the prompt was cut in silence",
)
def test_a_prompt_that_is_too_long_is_refused(runs, warm):
    for prompt in ("a" * POSITIONS, "a" * 500):
        with pytest.raises(
            ConfigError, match=f"tokens of the prompt={len(prompt)}, model.max_position_embeddings={POSITIONS}"
        ):
            TextStream(str(runs / "short"), prompt)
    assert len("".join(TextStream(str(runs / "short"), "a" * (POSITIONS - 1)))) <= 1
    done = warm.phalanx("generate", str(runs / "short"), "--prompt", "b" * 5000)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr) < 400 and "Traceback" not in done.stderr


@pytest.mark.trust(27, "Ctrl-C during phalanx generate", "text appears as it is made, what there is stays, exit 130")
def test_text_appears_as_it_is_made_and_stays_on_ctrl_c(runs, warm):
    """The signal is sent when some of the text is there: it could not be, if all came at the end, and the rest would
    take minutes."""
    words = [
        str(warm.folder / "phalanx"),
        "generate",
        str(runs / "long"),
        "--prompt",
        "Arma",
        "--tokens",
        "8000",
        "--temperature",
        "0",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as program:
        assert program.stdout is not None
        seen = program.stdout.read(len("Arma") + 4)
        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate(timeout=60)
    assert program.returncode == 130 and b"stopped by Ctrl-C" in errors and b"Traceback" not in errors
    text = (seen + rest).decode(errors="replace")
    assert text.startswith("Arma") and text.endswith("\n") and 8 <= len(seen + rest) < 8000
