"""A data source from outside the package, in one file that no file of ours names: through the central test, a resumed
run and the rules of the config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.base.errors import CheckpointError, ConfigError, DataError
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.config.device_check import Facts
from phalanx.config.read import load_run, read
from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.data.loader import micro_batch_samples, train_loader, valid_loaders
from phalanx.forecast.check import check
from phalanx.layout.config import LayoutConfig
from phalanx.training.main import train
from phalanx.training.resume import contents_of
from tests.harness import parity
from tests.training.test_loop import make_run, rows_of

SUMS = "tests.outside.sums_source:Sums"
STEPS = 2
LAYOUTS = {
    "dp2": (2, {}),
    "dp2, sharding 3": (2, {"sharding": 3}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
}
SIZES = {"seq_length": 16, "seed": 1, "vocab_size": 67}


def sums(**fields) -> DataConfig:
    return DataConfig(source=SUMS, source_config=fields, document_attention=True)


def run_of(layout: dict | None = None) -> Run:
    run = parity.base_run("llama")
    return replace(run, data=sums(samples=11), layout=LayoutConfig(**(layout or {})))


def batches_of_step(run: Run, mesh, step: int, documents) -> list:
    """What the loop gives a rank, in place of the central test's own tokens."""
    t = run.train
    loader = train_loader(
        run.data, seq_length=t.seq_length, seed=t.seed, vocab_size=run.model.vocab_size, samples=STEPS * t.global_batch
    )
    mine = micro_batch_samples(step * t.global_batch, t.global_batch, t.micro_batch, mesh.dp.size, mesh.dp.index)
    return [loader.batch(samples).cut(mesh.part) for samples in mine]


def one_rank(rank: int, world: int, run: Run) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "step_batches", batches_of_step)
        return parity.run_layout(rank, world, run, STEPS, True)


_truth: dict = {}


def truth_of(ranks) -> dict:
    if not _truth:
        [alone] = ranks.run("tests.outside.test_source:one_rank", 1, run_of())
        _truth.update(alone, grads=[parity.assemble([g]) for g in alone["grads"]])
        _truth["weights"] = parity.assemble([alone["weights"]])
    return _truth


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing(ranks, name):
    """Samples of the second step start the second epoch: 11 samples, 16 are taken."""
    world, layout = LAYOUTS[name]
    parity.compare(ranks.run("tests.outside.test_source:one_rank", world, run_of(layout)), truth_of(ranks), STEPS)


def numbers(run: Run) -> dict[int, tuple[float, ...]]:
    rows = rows_of(run)
    losses = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}
    return losses | {-row["step"]: (row["valid/valid"],) for row in rows if "valid/valid" in row}


def test_a_resumed_run_goes_on_in_the_same_row_of_samples(tmp_path):
    """To the same bits, in mid-epoch; validation has samples of its own. Other fields of the source are refused."""
    whole = make_run(tmp_path / "whole", steps=5, eval_interval=5, global_batch=4)
    whole = replace(whole, data=sums(samples=7), checkpoint=CheckpointConfig(interval=3))
    train(whole, Placement())
    cut = replace(whole, dir=str(tmp_path / "cut"), optim=replace(whole.optim, decay_steps=5))
    train(replace(cut, train=replace(cut.train, steps=3)), Placement())
    train(cut, Placement())
    found = numbers(cut)
    del found[-3]  # the evaluation at the end of the first start
    assert found == numbers(whole) and len(found) == 6
    other = replace(cut, data=sums(samples=7, largest=99), train=replace(cut.train, steps=6))
    with pytest.raises(CheckpointError, match=r"data\.sources"):
        train(other, Placement())


def test_samples_and_epochs():
    """Each sample once per epoch, in another order; an endless source in the order of its numbers."""
    loader = train_loader(sums(samples=7), samples=21, **SIZES)
    windows = [place.window for place in loader.locate(range(21))]
    epochs = [windows[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len({tuple(e) for e in epochs}) == 3
    assert [p.window for p in train_loader(sums(), samples=9, **SIZES).locate(range(9))] == list(range(9))
    [valid] = valid_loaders(sums(samples=7), **SIZES).values()
    assert [p.window for p in valid.locate(range(7))] == list(range(7))
    assert not np.array_equal(valid.sources[0].window(3), loader.sources[0].window(3))
    batch = loader.batch([0])
    text = batch.tokens[batch.documents == 0].tolist()
    assert 11 in text and text.index(10) < text.index(11)
    assert contents_of(train_loader(sums(largest=9), samples=1, **SIZES).sources[0]) != contents_of(
        train_loader(sums(), samples=1, **SIZES).sources[0]
    )


def problems(*overrides: str) -> dict[str, str]:
    run = load_run(None, [*overrides], base=replace(make_run(Path("x"), steps=1), data=DataConfig()))
    return {p.field: p.rule for p in check(run, Facts(files=False))}


def test_what_is_wrong_with_it_is_said_before_the_run():
    assert problems(f"data.source={SUMS}", "data.source_config.largest=50") == {}
    assert load_run(None, ["data.source=sums"], base=make_run(Path("x"))).data.source == SUMS
    [rule] = problems("data.source=tests.outside.sums_sorce:Sums").values()
    assert "there is no module tests.outside.sums_sorce" in rule and SUMS in rule
    [rule] = problems("data.source=tests.outside.sums_source:Unfinished").values()
    assert "has no sample(self, number: int)" in rule
    assert problems("data.source=nothing")["data.source"].startswith("must ")
    wrong = problems(f"data.source={SUMS}", "data.source_config={larges: 3, samples: many}", "data.packing=online")
    assert "which has largest, samples" in wrong["data.source_config.larges"]
    assert "must be int" in wrong["data.source_config.samples"] and "needs token files" in wrong["data.packing"]
    assert problems(f"data.source={SUMS}", "data.mock=true") == {"data.mock": "excludes data.source"}
    [rule] = problems(f"data.source={SUMS}", "data.split='90,10,0'").values()
    assert rule == "has no effect without token files"
    assert "data.source_config" in problems("data.mock=true", "data.source_config.a=1")
    [found] = read(None, [], {"data": {"source": "somewhere.else:Sums"}}, "the config of a checkpoint").problems
    assert found.field == "data.source" and "type data.source=somewhere.else:Sums" in found.rule


def test_wrong_samples_stop_the_run():
    wrong = replace(sums(), source="tests.outside.sums_source:Wrong")
    with pytest.raises(DataError, match=r"sample 0 is int64 \(16,\): it must be train.seq_length \+ 1 = 17 integers"):
        train_loader(wrong, samples=4, **SIZES).batch([0])
    with pytest.raises(DataError, match="has a token outside the vocabulary"):
        train_loader(replace(wrong, source_config={"largest": 9999}), samples=4, **SIZES).batch([0])
    with pytest.raises(DataError, match="has 0 samples"):
        train_loader(sums(samples=0), samples=4, **SIZES)
    with pytest.raises(ConfigError, match="is not a field of SumsConfig"):
        train_loader(sums(size=3), samples=4, **SIZES)
