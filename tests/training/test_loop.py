"""The loop on one process: batch ramp-up, evaluation, trackers, numerical stop, the folder's lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.base.errors import FolderInUse, NumericalStop
from phalanx.base.log import Log
from phalanx.base.placement import Placement
from phalanx.base.records import SinkStart
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.lock import FolderLock
from phalanx.config.run import LogConfig, RampConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import train_loader
from phalanx.models.llama import LlamaConfig
from phalanx.observe import report
from phalanx.observe.sinks import Sinks
from phalanx.optim.config import OptimConfig
from phalanx.planning.order import global_batch_at, micro_batches, total_samples
from phalanx.training.main import train

MODEL = LlamaConfig(vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)


def make_run(folder: Path, **options) -> Run:
    settings = {"steps": 12, "global_batch": 8, "micro_batch": 2, "seq_length": 16, "device": "cpu", **options}
    return Run(
        model=MODEL,
        train=TrainConfig(**settings),
        data=DataConfig(mock=True),
        optim=OptimConfig(lr=3e-3),
        log=LogConfig(report=False),
        dir=str(folder),
    )


def rows_of(run: Run) -> list[dict]:
    return [json.loads(line) for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines()]


RAMP = RampConfig(start=2, increment=2, samples=24)


def test_ramp_up_by_hand(tmp_path):
    """4 levels (2, 4, 6, 8) over 24 samples: 6 samples of each, a level is left at the step that starts past its
    end."""
    run = make_run(tmp_path, rampup=RAMP)
    sizes, consumed = [], 0
    for _ in range(12):
        sizes.append(global_batch_at(run, consumed))
        consumed += sizes[-1]
    assert sizes == [2, 2, 2, 4, 4, 6, 8, 8, 8, 8, 8, 8]  # consumed before each: 0 2 4 | 6 10 | 14 | 20 ...
    assert total_samples(run) == sum(sizes) == consumed
    assert total_samples(run, consumed=14, step=5) == consumed


@pytest.mark.parametrize("dp", [1, 2])
def test_ramp_up_takes_each_sample_once_for_any_dp(tmp_path, dp):
    run = make_run(tmp_path, rampup=RampConfig(start=4, increment=4, samples=16))
    loader = train_loader(
        run.data, seq_length=run.train.seq_length, seed=0, vocab_size=run.model.vocab_size, samples=total_samples(run)
    )
    seen = [s for rank in range(dp) for mb in micro_batches(run, loader, 0, 0, dp, rank) for s in mb]
    assert sorted(seen) == list(range(total_samples(run)))


def test_a_run_stopped_inside_the_ramp_goes_on(tmp_path):
    whole, halves = make_run(tmp_path / "whole", rampup=RAMP), make_run(tmp_path / "halves", rampup=RAMP)
    optim = replace(whole.optim, decay_steps=12)
    train(replace(whole, optim=optim), Placement())
    train(replace(halves, optim=optim, train=replace(halves.train, steps=5)), Placement())
    train(replace(halves, optim=optim), Placement())
    keys = ("step", "loss", "grad_norm", "consumed_samples", "tokens")
    assert [[r[k] for k in keys] for r in rows_of(halves)] == [[r[k] for k in keys] for r in rows_of(whole)]
    assert [r["consumed_samples"] for r in rows_of(whole)][:6] == [2, 4, 6, 10, 14, 20]


def test_evaluation_does_not_depend_on_the_micro_batch(tmp_path):
    """6 samples in micro-batches of 1, 2 and 4 (the last one filled up): the same mean loss."""
    found = []
    for size in (1, 2, 4):
        run = make_run(
            tmp_path / str(size), steps=1, micro_batch=size, eval_interval=1, eval_samples=6, precision="fp64"
        )
        train(run, Placement())
        found += [r["valid/valid"] for r in rows_of(run) if "valid/valid" in r]
    assert len(found) == 3 and found == pytest.approx([found[0]] * 3, rel=1e-12)


def test_nan_stops_the_run(tmp_path):
    """A learning rate that destroys the weights: every later step is skipped and counted, then the run ends with
    exit code 5."""
    run = make_run(tmp_path, max_skipped=3)
    with pytest.raises(NumericalStop) as stopped:
        train(replace(run, optim=OptimConfig(lr=1e38, clip_grad=0.0, schedule="constant")), Placement())
    assert stopped.value.exit_code == 5
    assert rows_of(run)[-1]["skipped"] >= 3


def test_a_folder_has_one_run(tmp_path):
    run = make_run(tmp_path)
    with FolderLock(tmp_path), pytest.raises(FolderInUse):
        train(run, Placement())


def test_tensorboard_has_every_step(tmp_path):
    run = make_run(tmp_path, steps=4)
    train(replace(run, log=LogConfig(report=False, tensorboard=True)), Placement())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([r["loss"] for r in rows_of(run)])


def test_metrics_of_steps_after_the_checkpoint_are_dropped(tmp_path):
    """A killed run's file ends in steps that will be done again, and perhaps in half a line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    Sinks(LogConfig(), SinkStart(tmp_path, 1, {}, Log())).close()
    assert path.read_text() == '{"step": 1, "loss": 2.0}\n'


def test_keeping_checkpoints(tmp_path):
    run = make_run(tmp_path)
    train(replace(run, checkpoint=CheckpointConfig(interval=3, keep_last=2)), Placement())
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000009", "step-00000012"]


def test_checkpoint_verify_reads_every_byte(tmp_path):
    """One flipped bit in the weights: the command names the file and ends with exit code 4."""
    from click.testing import CliRunner

    from phalanx.base.errors import CheckpointError
    from phalanx.cli.main import cli

    train(make_run(tmp_path, steps=2), Placement())
    done = CliRunner().invoke(cli, ["checkpoint", "verify", str(tmp_path)])
    assert done.exit_code == 0 and "step-00000002 good" in done.output
    weights = tmp_path / "checkpoints" / "step-00000002" / "weights" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = CliRunner().invoke(cli, ["checkpoint", "verify", str(tmp_path)])
    assert isinstance(done.exception, CheckpointError) and "model.safetensors" in str(done.exception)


def test_a_step_imports_no_symbolic_arithmetic(tmp_path):
    """Half a second of the first step of every process: `Tensor.backward` with a gradient imports it."""
    code = (
        "import sys; from phalanx.base.placement import Placement; "
        "from phalanx.config.read import load_run; from phalanx.training.main import train; "
        "train(load_run('recipes/tiny_llama.yaml', ['train.steps=2', 'train.device=cpu', 'data.mock=true', "
        f"'dir={tmp_path}']), Placement()); "
        "print(sorted({'sympy', 'torch._dynamo', 'torch._inductor', 'transformers'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=env, timeout=100)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr


def test_a_signal_during_the_report_is_too_late(tmp_path, monkeypatch):
    """The run is done: what was there before to hear signals does not hear it."""
    heard = []
    monkeypatch.setattr(
        report, "write_report", lambda folder: os.kill(os.getpid(), signal.SIGTERM) or folder / "report.html"
    )
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("before"))
    try:
        train(replace(make_run(tmp_path, steps=1), log=LogConfig()), Placement())
        assert not heard
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["before"]
    finally:
        signal.signal(signal.SIGTERM, before)
