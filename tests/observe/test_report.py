"""report.html: what it says of a run, and what it must not say. How it looks was looked at in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phalanx.config.run import LogConfig
from phalanx.config.write import save_run
from phalanx.observe.curves import LEFT, POINTS, Curve, Plot, draw, smoothed, ticks
from phalanx.observe.report import what_was_set, write_report
from phalanx.observe.starts import HIDDEN, read_starts, redacted
from tests.training.test_loop import make_run, rows_of

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.trust(
    29, "report.html after a run", "date, machine, versions, command, data, smoothed loss, config that was set"
)
def test_what_a_report_says(warm, tmp_path):
    run = make_run(tmp_path / "run", steps=60, eval_interval=20)
    save_run(replace(run, log=LogConfig()), tmp_path / "run.yaml")
    secrets = {"WANDB_API_KEY": KEY, "HF_TOKEN": "hf_abcdefghijklmnopqrst"}
    done = warm.phalanx("train", str(tmp_path / "run.yaml"), "train.seed=77", env=secrets)
    assert done.returncode == 0, done.stderr
    page, [start] = (tmp_path / "run/report.html").read_text(), read_starts(tmp_path / "run")
    assert (
        start["command"].endswith("train.seed=77")
        and start["command"].startswith("phalanx train ")
        and start["command"] in page
    )
    best = min((r["valid/valid"], r["step"]) for r in rows_of(run) if "valid/valid" in r)
    assert f"best {best[0]:.4f} at step {best[1]}" in page and page.count("perplexity") == 2
    for wanted in (
        start["host"],
        "torch",
        "python",
        "date",
        "duration",
        "Loss over steps",
        "Loss over tokens",
        "endless",
        "train.seed: 77",
    ):
        assert wanted in page, wanted
    assert "optim.beta1" not in page.split("<details>")[0] and "beta1" in page.split("<details>")[1]
    assert KEY not in page and "hf_abcdefghij" not in page
    figures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(figures) == 5 and all(ElementTree.fromstring(figure) is not None for figure in figures)
    assert page.count("<polyline") == 2 * 3 + 2 + 1 + 2  # loss: as it is, smoothed, validation


def test_a_report_of_an_older_run_or_with_half_a_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "los')
    (tmp_path / "config.yaml").write_text("model: {family: llama}\n")
    assert "none finished" in write_report(tmp_path).read_text()


def test_a_loss_that_a_program_logged_itself_is_no_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "mine": 1.0}\n')
    (tmp_path / "config.yaml").write_text("model: {family: llama}\n")
    assert "none finished" in write_report(tmp_path).read_text()


def test_only_what_was_set():
    text = (
        "train: {steps: 5, seed: 1234, precision: bf16}\noptim: {lr: 0.0003, lr_scale: {}}\nmodel: "
        "{family: llama}\ndir: runs/x\n"
    )
    shown = what_was_set(text).splitlines()
    assert "train.steps: 5" in shown and 'train.precision: "bf16"' in shown and 'dir: "runs/x"' in shown
    assert not [line for line in shown if "seed" in line or "lr_scale" in line]


@pytest.mark.parametrize(
    "text, gone",
    [
        ("phalanx train a.yaml data.paths=[s3://key:pass@bucket/x]", "key:pass"),
        ("WANDB_API_KEY=abcdef1234", "abcdef1234"),
        ("hf_abcdefghijklmnopqrst", "hf_abc"),
        (f"wandb login {KEY}", KEY),
        ("AKIAABCDEFGHIJKLMNOP", "AKIAABC"),
        ("password: hunter2", "hunter2"),
    ],
)
def test_secrets_are_hidden(text, gone):
    assert gone not in redacted(text) and HIDDEN in redacted(text)


def test_what_is_no_secret_stays():
    text = "phalanx train run.yaml data.tokenizer=out/tok train.seed=5 tokens: 15000 https://example.org/a:b"
    assert redacted(text) == text


def test_plots_line_up_and_are_thinned():
    pictures = [
        draw(Plot("a", "step", [Curve("a", range(1, 50_001), [s * n for n in range(50_000)])], 50_000))
        for s in (1e-6, 1e9)
    ]
    for picture in pictures:
        points = re.search(r'points="([^"]*)"', picture)[1].split()
        assert len(points) <= POINTS + 2 and float(points[0].split(",")[0]) - LEFT < 1
    assert (
        ticks(0, 1000, 4) == [0, 250, 500, 750, 1000]
        or ticks(0, 1000, 4) == [0, 200, 400, 600, 800, 1000]
        or ticks(0, 1000, 4) == [0, 500, 1000]
    )
    assert smoothed([1.0, float("nan"), 1.0]) == [1.0, 1.0, 1.0]
    assert draw(Plot("nothing", "step", [Curve("a", [1], [float("nan")])], 1)) == ""
