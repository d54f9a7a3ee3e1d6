"""The public API: the same checks and errors as on the command line, and a session that is `train` with the caller's
loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from errno import ENOSPC
from pathlib import Path

import pytest
import torch

import phalanx as px
from phalanx.base.errors import ConfigError, Preempted
from phalanx.checkpoint.keep import list_checkpoints
from phalanx.checkpoint.manifest import parse
from phalanx.checkpoint.saver import Saver
from phalanx.checkpoint.storage import Storage
from phalanx.forecast.text import plan_text

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "model": {
        "family": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "train": {
        "steps": 8,
        "global_batch": 4,
        "micro_batch": 2,
        "seq_length": 16,
        "device": "cpu",
        "eval_interval": 4,
        "eval_samples": 4,
    },
    "optim": {"lr": 3e-3, "warmup_steps": 2},
    "data": {"mock": True},
    "checkpoint": {"interval": 4},
    "log": {"report": False},
}


def load(folder: Path, *overrides: str) -> px.Run:
    return px.load(None, f"dir={folder}", *overrides, base=CONFIG)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(folder) if "loss" in row}


def saved(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted((folder / f"checkpoints/step-{step:08}/weights").glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "trained"
    px.train(load(folder))
    return folder


def test_every_public_name_is_what_it_says_whatever_is_imported():
    """Python binds a sub-package over a name of its package as soon as anybody imports it."""
    code = (
        "import importlib, pkgutil, phalanx as px\n"
        "assert 'torch' not in __import__('sys').modules\n"
        "for m in pkgutil.walk_packages(px.__path__, 'phalanx.'):\n"
        "    if not m.name.endswith(('_kernel', '__main__', 'wandb_run', 'tensorboard_file')):\n"
        "        try: importlib.import_module(m.name)\n"
        "        except ModuleNotFoundError as e: assert not e.name.startswith('phalanx'), e\n"
        "for name in px.__all__:\n"
        "    value = getattr(px, name)\n"
        "    assert name == '__version__' or callable(value), name\n"
        "assert set(dir(px)) == set(px.__all__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        px.trane  # noqa: B018


def test_errors_are_those_of_the_command_line(tmp_path, warm):
    words = ["layout.tp=3", "train.device=cpu", "optim.lr=-1"]
    run = load(tmp_path / "run", "layout.tp=3", "optim.lr=-1")
    with pytest.raises(ConfigError) as raised:
        px.check(run)
    (tmp_path / "run.json").write_text(json.dumps({**CONFIG, "dir": str(tmp_path / "run")}))
    done = warm.phalanx("train", str(tmp_path / "run.json").replace(".json", ".yaml"), *words)
    (tmp_path / "run.yaml").write_text((tmp_path / "run.json").read_text())
    done = warm.phalanx("train", str(tmp_path / "run.yaml"), *words)
    assert done.returncode == 2
    fields = {problem.field for problem in raised.value.problems}
    assert "optim.lr" in fields and any(field.startswith("layout.tp") for field in fields)
    assert all(problem.field in done.stderr for problem in raised.value.problems), done.stderr
    with pytest.raises(ConfigError, match="train.stepz"):
        px.load(None, "train.stepz=5", base=CONFIG)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("start", [px.train, lambda run: px.session(run).__enter__()])
def test_a_layout_that_needs_more_ranks_says_how_to_start_them(tmp_path, start):
    run = load(tmp_path / "run", "layout.tp=2", "layout.pp=2")
    with pytest.raises(ConfigError, match=r"needs 4 ranks.*torchrun --nproc-per-node 4 .*phalanx train CONFIG --ranks"):
        start(run)
    assert not (tmp_path / "run").exists()


def test_a_plan_is_that_of_the_command_line(tmp_path):
    run = load(tmp_path / "run", "layout.tp=2")
    assert str(px.plan(run, 4)) == plan_text(run, 4) and str(px.plan(run)) == plan_text(run, 2)
    big = px.load(ROOT / "recipes/llama3_8b.py")
    assert not px.plan(big, 1, device="H100").fits and px.plan(run, 2, device="H100").fits
    with pytest.raises(ConfigError, match="must be one of .*H100"):
        px.plan(run, 4, device="H1000")
    with pytest.raises(ConfigError, match="layout.tp"):
        px.plan(run, 3)


def test_callbacks_hear_what_files_hold(tmp_path):
    heard: list = []

    class Listener(px.Callback):
        def on_step(self, values):
            heard.append(dict(values))

        def on_evaluation(self, step, losses):
            heard.append({"step": step, **{f"valid/{name}": loss for name, loss in losses.items()}})

        def on_save(self, path):
            heard.append(path)

    px.train(load(tmp_path / "run"), callbacks=[Listener()])
    assert [row for row in heard if isinstance(row, dict)] == rows(tmp_path / "run")
    assert [path.name for path in heard if isinstance(path, Path)] == saved(tmp_path / "run")

    class Broken(px.Callback):
        def on_step(self, values):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        px.train(load(tmp_path / "broken"), callbacks=[Broken()])


@pytest.mark.parametrize("way", ["train_step", "accumulate and apply"])
def test_a_session_is_train_with_another_loop(tmp_path, trained, way):
    """Losses, norms and saved weights to the bit; evaluation and saves when the caller wants them."""
    folder = tmp_path / "run"
    with px.session(load(folder)) as s:
        assert s.step == 0 and s.run.train.steps == 8
        for batches in s.batches():
            if way == "train_step":
                s.train_step(batches)
            else:
                tokens = s.accumulate(batches)
                assert tokens.item() == 64 and all(p.grad is not None for p in s.model.parameters())
                s.apply()
            if s.step == 4:
                found = s.evaluate()
                s.save()
                s.save()  # the same step once more: the newer one counts
    assert losses(folder) == losses(trained)
    expected = next(row["valid/valid"] for row in rows(trained) if row["step"] == 4 and "valid/valid" in row)
    assert found == {"valid": expected} and saved(folder) == saved(trained) == ["step-00000004", "step-00000008"]
    for name, value in weights(trained, 8).items():
        assert torch.equal(weights(folder, 8)[name], value), name


def test_a_session_goes_on_where_it_was_left(tmp_path, trained):
    folder, seen = tmp_path / "run", []
    with px.session(load(folder)) as s:
        for batches in s.batches():
            s.train_step(batches)
            if s.step == 3:
                break
    assert saved(folder) == ["step-00000003"] and list(losses(folder)) == [1, 2, 3]
    with pytest.raises(ZeroDivisionError), px.session(load(folder)) as s:  # saves nothing
        for batches in s.batches():
            s.train_step(batches)
            1 / (5 - s.step)
    assert saved(folder) == ["step-00000003"]
    with px.session(load(folder)) as s:
        for batches in s.batches():
            seen.append(s.step)
            s.train_step(batches)
    assert seen == [4, 5, 6, 7, 8] and losses(folder) == losses(trained)


def test_batches_that_are_asked_for_again_go_on(tmp_path, trained):
    """The step that was under way counts, and no sample comes twice."""
    folder, seen = tmp_path / "run", []
    with px.session(load(folder)) as s:
        for stop in (3, 4, 8):
            for batches in s.batches():
                s.train_step(batches)
                seen.append(s.step)
                if s.step == stop:
                    break
    assert seen == list(range(1, 9)) and losses(folder) == losses(trained)


def test_a_stop_request_saves_and_raises(tmp_path, trained):
    folder = tmp_path / "run"
    with pytest.raises(Preempted), px.session(load(folder)) as s:
        for batches in s.batches():
            s.train_step(batches)
            if s.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
    at = max(losses(folder))
    assert 2 < at < 6 and saved(folder) == [f"step-{at:08}"]
    px.train(load(folder))
    assert losses(folder) == losses(trained)


def test_a_stop_request_waits_for_the_callers_save_of_that_step(tmp_path, monkeypatch):
    """Its disk stands still until the save is waited for."""
    folder, waited_for, wait, begin = tmp_path / "run", threading.Event(), Saver.wait, Storage.begin

    def told(saver: Saver):
        if saver._under_way is not None:
            waited_for.set()
        return wait(saver)

    def begun(storage: Storage, *given):
        assert waited_for.wait(60)
        return begin(storage, *given)

    monkeypatch.setattr(Saver, "wait", told)
    monkeypatch.setattr(Storage, "begin", begun)
    with pytest.raises(Preempted, match="saved step 2"), px.session(load(folder)) as s:
        for batches in s.batches():
            if s.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            s.train_step(batches)
            if s.step == 2:
                s.save()
    there = saved(folder)
    waited_for.set()
    assert there == ["step-00000002"]


@pytest.mark.parametrize(("background", "failing"), [(False, 8), (True, 4)])
def test_a_failed_save_is_none(tmp_path, monkeypatch, background, failing):
    """With checkpoint.on_error=continue: a clean end saves the last step again, and the parent is one that exists."""
    folder, create, failed = tmp_path / "run", Storage.create, list[Path]()

    def full(storage: Storage, path: Path):
        if f"step-{failing:08}" in str(path) and not failed:
            failed.append(path)
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return create(storage, path)

    monkeypatch.setattr(Storage, "create", full)
    options = ["checkpoint.on_error=continue", f"checkpoint.background={str(background).lower()}"]
    with px.session(load(folder, *options)) as s:
        for batches in s.batches():
            s.train_step(batches)
            if s.step in (2, failing):
                s.save()
    assert failed and saved(folder) == ["step-00000002", "step-00000008"]
    assert parse(folder / "checkpoints/step-00000008").parent == 2


def test_an_error_in_the_callers_loop_ends_the_batches(tmp_path):
    """And is the only one: what is left to the end of the interpreter fails there, with words of its own."""
    with pytest.raises(ValueError, match="the caller's"), px.session(load(tmp_path / "run")) as s:
        steps = s.batches()
        for batches in steps:
            s.train_step(batches)
            raise ValueError("the caller's")
    assert next(steps, None) is None and saved(tmp_path / "run") == []


def test_a_rate_of_ones_own_and_lines(tmp_path, capfd):
    folder = tmp_path / "run"
    with px.session(load(folder, "train.steps=2", "optim.warmup_steps=1", "train.eval_interval=1")) as s:
        for batches in s.batches():
            result = s.train_step(batches, lr=0.0)
            s.log(result, note="mine", depth=s.step)
            s.log({"reward": 0.5})
    said = capfd.readouterr().out
    assert "note=mine depth=1" in said and "step=2 reward=0.5" in said and "tok/s" not in said
    found = rows(folder)
    assert [row["lr"] for row in found if "lr" in row] == [0.0, 0.0]
    assert [row["depth"] for row in found if "depth" in row] == [1, 2]


def test_steps_out_of_order_are_said(tmp_path):
    with pytest.raises(RuntimeError, match="neither train_step"), px.session(load(tmp_path / "a")) as s:
        for _ in s.batches():
            pass
    with pytest.raises(RuntimeError, match="comes after accumulate"), px.session(load(tmp_path / "b")) as s:
        for _ in s.batches():
            s.apply()


def test_a_loop_without_apply_has_no_qk_clip(tmp_path):
    """It would count heads that nothing has clipped."""
    options = ["layout.sharding=0", "optim.qk_clip=100"]
    with pytest.raises(RuntimeError, match="optim.qk_clip is part of apply"), px.session(load(tmp_path, *options)) as s:
        for batches in s.batches():
            s.accumulate(batches)


def test_an_optimizer_of_torch_takes_the_place_of_ours(tmp_path, trained):
    """AdamW with our numbers: the same losses up to rounding."""
    folder = tmp_path / "run"
    with px.session(load(folder, "layout.sharding=0", "optim.clip_grad=0")) as s:
        o = s.run.optim
        theirs = torch.optim.AdamW(s.model.parameters(), betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=0.0)
        for batches in s.batches():
            s.accumulate(batches)
            theirs.param_groups[0]["lr"] = s.lr
            theirs.step()
    px.train(load(tmp_path / "ours", "layout.sharding=0", "optim.clip_grad=0", "optim.weight_decay=0"))
    ours, found = losses(tmp_path / "ours"), losses(folder)
    assert [loss for loss, _ in found.values()] == pytest.approx([loss for loss, _ in ours.values()], rel=1e-5)
    for name, value in weights(tmp_path / "ours", 8).items():
        torch.testing.assert_close(weights(folder, 8)[name], value, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="needs layout.sharding=0"), px.session(load(tmp_path / "sharded")) as s:
        for batches in s.batches():
            s.accumulate(batches)
    assert not saved(tmp_path / "sharded")


def test_a_guard_that_rolls_back_rewinds_the_batches(tmp_path):
    """A learning rate far too large at step 6: the loss is a spike at 7, and the steps after 4 come again."""
    guard = ["train.guard.policy=rollback", "train.guard.sigmas=6", "train.guard.window=4"]
    folder, seen = tmp_path / "run", []
    run = load(folder, "train.steps=10", "train.max_skipped=5", *guard)
    with px.session(run) as s:
        for batches in s.batches():
            seen.append(s.step)
            first = seen.count(s.step) == 1
            s.train_step(batches, lr=1e3 if s.step == 6 and first else None)
            if s.step == 4 and first:
                s.save()
    again = [step for step in seen if seen.count(step) > 1]
    assert seen[-1] == 10 and again[:2] == [5, 6] and sorted(losses(folder)) == list(range(1, 11))
    assert "rolled back to" in (folder / "log.txt").read_text()


def test_training_imports_nothing_that_it_may_not_need():
    """Reading configs (pydantic, ruamel), the report (jinja2) and a recompute budget (Triton) are paid by who uses
    them."""
    code = "import phalanx.training.main, sys; print(*{'jinja2', 'pydantic', 'ruamel', 'triton'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
