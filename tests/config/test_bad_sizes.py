"""Configs, values and paths of any size, and limits of the system: each ends in a sentence, at once."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.base.errors import Problem
from phalanx.base.log import refusal
from phalanx.cli.main import guarded
from phalanx.config.read import MAX_BYTES, read

LONG = "x/" * 2500
SECONDS = 10  # the issue says one; a loaded machine is given more. Before, these took 19 s to for ever


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    return "\n".join([*lines, *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels))])


@pytest.mark.trust(
    18,
    "phalanx train with a YAML file of aliases that stand for a thousand million values",
    "exit 2 within a second, with the limit",
)
@pytest.mark.parametrize(
    "text, said",
    [
        (bomb(9), "at most 50,000 values"),
        (bomb(7), "at most 50,000 values"),
        ("a: &a [*a, *a]", "must not contain itself"),
        ("a: &a " + "x" * 100_000 + "\nb: [" + "*a, " * 1000 + "]", "characters"),
        ("[" * 5000, "too many brackets"),
        ("a: " + "[" * 150 + "]" * 150, "inside each other"),
        ("a" * (MAX_BYTES + 1), "is no config: it has more than"),
    ],
)
def test_configs_of_any_size_are_answered_at_once(tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(text)
    read(None, ("train.steps=1",))  # builds the schema
    began = time.monotonic()
    problems = read(tmp_path / "run.yaml").problems
    assert time.monotonic() - began < SECONDS
    assert any(said in str(problem) for problem in problems) and all(len(str(problem)) < 6000 for problem in problems)


@pytest.mark.trust(
    18,
    "phalanx train run.yaml model.family=(a million letters)",
    "the message shows 200 letters, and how many there are",
)
@pytest.mark.parametrize(
    "override", ["model.family=" + "x" * 1_000_000, "a" * 100_000 + "=1", "train.steps=[" + "1," * 20_000 + "1]"]
)
def test_messages_show_the_beginning_of_what_is_long(override):
    problems = read(None, (override,)).problems
    assert problems and all(len(str(problem)) < 6000 for problem in problems)
    assert any("characters)" in str(problem) for problem in problems)


def test_a_problem_of_ordinary_length_is_shown_whole():
    problem = Problem("data.paths", "x" * 300, "must exist", {"a": 1}, ("y",))
    assert "x" * 300 in str(problem)


@pytest.mark.trust(18, "phalanx train with paths of 5,000 characters", "a sentence each, no traceback")
@pytest.mark.parametrize(
    "words",
    [
        ("train", LONG + "run.yaml"),
        ("train", "x" * 5000),
        ("train", LONG + "run.py"),
        ("train", "run.yaml", f"data.paths={LONG}"),
        ("train", "run.yaml", f"data.tokenizer={LONG}"),
        ("train", "run.yaml", f"init_from={LONG}"),
        ("train", "run.yaml", "data.mock=true", f"dir={LONG}"),
        ("train", "run.yaml", "data.mock=true", f"checkpoint.load={LONG}"),
        ("data", "prepare", LONG, "-o", "x", "--tokenizer", "bytes"),
        ("data", "prepare", "run.yaml", "-o", LONG, "--tokenizer", "bytes"),
        ("data", "show", LONG),
        ("data", "verify", LONG),
        ("checkpoint", "list", LONG),
        ("checkpoint", "verify", LONG),
        ("generate", LONG, "--prompt", "a"),
    ],
    ids=lambda words: "-".join(word[:16].replace("/", "_") for word in words),
)
def test_paths_of_any_length(warm, tmp_path, words):
    (tmp_path / "run.yaml").write_text("""
model: {family: llama, vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1}
train: {steps: 1, global_batch: 1, micro_batch: 1, seq_length: 8, device: cpu}
dir: run
log: {report: false}
""")  # noqa: E501
    done = warm.phalanx(*words, cwd=tmp_path)
    assert done.returncode not in (0, -6, -11) and "Traceback" not in done.stderr and done.stderr.strip(), done.stderr[
        :3000
    ]
    assert len(done.stderr) < 20_000


def test_too_few_file_handles_are_a_sentence(capsys):
    """Of a library that wraps the error too."""
    for error in (OSError(24, "Too many open files"), RuntimeError("cannot open shared object: Too many open files")):

        def fail(error=error) -> None:
            raise error

        assert guarded(fail) == 1
        assert capsys.readouterr().err == "Too many open files; raise the limit of open files: ulimit -n 4096\n"
    assert refusal(ValueError("x")) is None


@pytest.mark.trust(18, "ulimit -n 24; phalanx train --ranks 2", "a sentence that says to raise the limit")
def test_a_real_limit_of_file_handles(tmp_path):
    (tmp_path / "run.yaml").write_text("""
model: {family: llama, vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1}
train: {steps: 1, global_batch: 2, micro_batch: 1, seq_length: 8, device: cpu}
data: {mock: true}
dir: run
log: {report: false}
""")  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "train", "run.yaml", "--ranks", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        timeout=250,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)),
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "may open only 24 files here, and 2 ranks need 80: raise the limit with `ulimit -n 4096`" in done.stderr
