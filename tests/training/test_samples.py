"""train.samples: text during training, in the log, the metrics and the report; training's bits stay."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from phalanx.base.errors import DataError
from phalanx.base.placement import Placement
from phalanx.config.run import LogConfig, Run
from phalanx.config.write import save_run
from phalanx.inference.generate import TextSampler
from phalanx.inference.request import SamplingOptions
from phalanx.optim.config import OptimConfig
from phalanx.training.main import train
from phalanx.training.samples import Prompts
from phalanx.training.session import session
from tests.training.test_loop import make_run, rows_of

LINES = ['{"prompt": "the <b>quick"}', '{"prompt": [72, 105]}', '{"prompt": ""}']
NUMBERS = ("step", "loss", "grad_norm", "tokens")


def run_with(folder, prompts=None, **options) -> Run:
    if prompts is not None:
        prompts.write_text("\n".join(LINES))
        given = {"samples": str(prompts), "samples_interval": 2, "samples_tokens": 9}
        options = {**given, "precision": "fp64", **options}
    run = make_run(folder, **{"steps": 5, "precision": "fp64", **options})
    model = replace(run.model, vocab_size=300, max_position_embeddings=32)
    optim = OptimConfig(lr=0.1, schedule="constant")  # so that a step changes what is likely
    return replace(run, model=model, optim=optim, data=replace(run.data, tokenizer="bytes"), log=LogConfig())


def test_text_while_a_run_trains(tmp_path, warm):
    """After steps 2, 4 and the last: the same text on two ranks of context parallelism and ZeRO-3 as on
    one, and from the checkpoint; and the losses' bits are those without text."""
    alone = run_with(tmp_path / "alone", tmp_path / "p.jsonl")
    train(alone, Placement())
    texts = {row["step"]: row["samples"] for row in rows_of(alone) if "samples" in row}
    assert list(texts) == [2, 4, 5] and all(list(each) == ["0", "1", "2"] for each in texts.values())
    assert all(each["0"].startswith("the <b>quick") and each["1"].startswith("Hi") for each in texts.values())
    assert len({each["0"] for each in texts.values()}) == 3  # the weights have changed
    without = run_with(tmp_path / "without")
    train(without, Placement())
    numbers = [[[row[k] for k in NUMBERS] for row in rows_of(run) if "loss" in row] for run in (alone, without)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 5
    log, page = ((tmp_path / "alone" / name).read_text() for name in ("log.txt", "report.html"))
    assert log.count("sample step=") == 9 and "sample step=4 prompt=1 text='Hi" in log
    assert "After step 5" in page and "the &lt;b&gt;quick" in page and "<b>quick" not in page
    with TextSampler(str(tmp_path / "alone")) as s:  # in float32
        how = SamplingOptions(tokens=9, temperature=0.8, seed=alone.train.seed)
        made = sorted((a.prompt, a.text) for a in s.generate(["the <b>quick", [72, 105]], how))
    assert [text for _, text in made] == [texts[5]["0"].removeprefix("the <b>quick"), texts[5]["1"].removeprefix("Hi")]
    split = run_with(tmp_path / "split", tmp_path / "p.jsonl")
    save_run(split, tmp_path / "run.yaml")
    done = warm.phalanx("train", str(tmp_path / "run.yaml"), "layout.sharding=3", "layout.cp=2", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert {row["step"]: row["samples"] for row in rows_of(split) if "samples" in row} == texts


def test_a_loop_of_ones_own_asks_for_text(tmp_path):
    run = run_with(tmp_path / "run", tmp_path / "p.jsonl", steps=1, samples_temperature=0.0)
    with session(run, Placement()) as s:
        for batches in s.batches():
            s.train_step(batches)
            found = s.make_samples()
            assert found == s.make_samples() and found["1"].startswith("Hi")
    assert [row["step"] for row in rows_of(run) if "samples" in row] == [1, 1]


@pytest.mark.parametrize(
    "line, options, said",
    [
        ('{"prompt": 5}', {}, "line 1 is not"),
        ('{"prompt": [299, 300]}', {}, "prompt 0 has tokens beyond model.vocab_size=300"),
        (json.dumps({"prompt": "a" * 24}), {}, "prompt 0 has 24 tokens: .* at most 23 fit"),
    ],
)
def test_prompts_that_cannot_be_continued_end_a_run_before_it_starts(tmp_path, line, options, said):
    run = run_with(tmp_path / "run", tmp_path / "p.jsonl", **options)
    (tmp_path / "p.jsonl").write_text(line)
    with pytest.raises(DataError, match=said):
        train(run, Placement())
    assert not (tmp_path / "run/metrics.jsonl").exists()
    with pytest.raises(DataError, match="cannot be read"):
        Prompts.read(replace(run, train=replace(run.train, samples=str(tmp_path / "missing.jsonl"))))
