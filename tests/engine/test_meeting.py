"""How a run begins: ranks of one run only, a folder that a refused start leaves as it was, the same problems in
Python as on the command line."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import typing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import phalanx as px
from phalanx.base import tree
from phalanx.base.errors import CheckpointError, ConfigError, DataError, PhalanxError
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.lock import FolderLock
from phalanx.comm.axis import Axis
from phalanx.config.read import load_run
from phalanx.config.run import Fp8Config, RampConfig, Run, token_count
from phalanx.config.write import to_yaml
from phalanx.data.config import DataConfig, SourceConfig
from phalanx.data.index import CorpusWriter
from phalanx.engine.meeting import Identity, compare, identity, problems
from phalanx.layout.config import LayoutConfig
from phalanx.models.gpt2 import GPT2Config
from phalanx.nn.adapter import AdapterConfig, completed_lora
from phalanx.nn.objective import TaskConfig, TokenObjective
from phalanx.ops.dense.token_loss import LogitStats
from phalanx.optim.adamw import AdamWConfig
from phalanx.planning.order import total_samples
from phalanx.training.main import train
from tests.harness.pool import free_port
from tests.training.test_loop import make_run, rows_of

CPU = torch.device("cpu")
NOT_COMPARED = {"dir", "log", "model_source", "cluster"}


# ---- ranks of one run ----------------------------------------------------------------------------


def compared(rank: int, world: int, pairs: list[tuple[Run, Run]]) -> list[Any]:
    """What this rank is told of each pair of configs, one for rank 0 and one for all others."""
    axis, found = Axis("world", tuple(range(world)), rank), list[Any]()
    for first, other in pairs:
        run = first if rank == 0 else other
        try:
            found.append(compare(axis, identity(run, CPU), run.dir))
        except ConfigError as error:
            found.append([(p.field, str(p)) for p in error.problems])
    return found


def another(value: Any, hint: Any, dice: random.Random) -> Any:
    """A value of a field's type that is not this one."""
    kinds = [h for h in tree.members(hint) if h is not type(None)]
    kind = kinds[0]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Fp8Config:
        return Fp8Config(recipe="delayed") if value is None else None
    if kind is RampConfig:
        return RampConfig(start=2, increment=2, samples=dice.randrange(9, 99))
    if origin is typing.Literal:
        return dice.choice([a for a in args if a != value])
    if origin is dict:
        inner = SourceConfig(paths=("x",)) if args[1] is SourceConfig else 0.5 if args[1] is float else ("x",)
        return {**value, f"name-{dice.random()}": inner}
    if origin in (tuple, list):
        element = {int: 3, float: 0.25}.get(args[0], "word")
        return origin([*(value or ()), element])
    if kind is bool:
        return not value
    if kind in (int, float):
        return kind((value or 1) + dice.randrange(1, 9))
    return f"{value}-{dice.randrange(99)}"


class Halved(TokenObjective):
    def token_loss(self, logits: LogitStats) -> Tensor:
        return (logits.log_z - logits.target) / 2


def changed(base: Run, dice: random.Random) -> tuple[str, Run]:
    """One field of one section, chosen at random, with another value."""
    sections = [name for name in tree.field_names(Run) if name not in NOT_COMPARED]
    section = dice.choice(sections)
    if section == "lora":  # the base has none
        return section, replace(base, lora=completed_lora(AdapterConfig(targets=[f"*.{dice.randrange(100)}.*"])))
    fields = [key for key in tree.keys(Run) if key.path.split(".")[0] == section and key.path.count(".") == 1]
    fields = [key for key in fields if section != "model" or key.owner is type(base.model)] or [
        k for k in tree.keys(Run) if k.path == section
    ]
    fields = [key for key in fields if key.path != "optim.name"]  # others need other classes
    fields = [key for key in fields if section != "task" or key.owner is type(base.task)]
    fields = [key for key in fields if section != "optim" or key.owner in type(base.optim).__mro__]
    key = dice.choice([key for key in fields if len(typing.get_args(key.hint)) != 1 or key.path == "model.family"])
    value = tree.get(base, key.path)
    if key.path == "optim.fallback":
        return key.path, tree.replace_at(base, key.path, AdamWConfig(lr=dice.random()))
    if key.path == "task.name":
        return key.path, replace(base, task=TaskConfig(name="tests.engine.test_meeting:Halved"))
    if key.path == "model.family":
        return key.path, replace(
            base, model=GPT2Config(vocab_size=67, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        )
    return key.path, tree.replace_at(base, key.path, another(value, key.hint, dice))


@pytest.mark.trust(
    2,
    "Two nodes with another optim.lr, train.seed or data.weights trained on and exited with 0; with other "
    "widths gloo aborted",
    "every rank ends with exit 2 before step 1, naming each field, the ranks and their values",
)
def test_200_random_differences_are_named_and_none_in_100_equal_starts(ranks):
    dice = random.Random(19)
    base = replace(make_run(Path("run")), init_from="weights", data=DataConfig(mock=True, tokenizer="bytes"))
    cases = [changed(base, dice) for _ in range(200)]
    pairs = [(base, other) for _, other in cases]
    pairs += [(base, replace(base, dir=f"run-{i}", log=replace(base.log, interval=i + 1))) for i in range(100)]
    found = ranks.run("tests.engine.test_meeting:compared", 2, pairs)
    assert {path.split(".")[0] for path, _ in cases} == set(tree.field_names(Run)) - NOT_COMPARED
    assert found[0] == found[1]
    for (path, _), told in zip(cases, found[0]):
        assert isinstance(told, list), f"{path}: nothing was said"
        fields = [field for field, _ in told]
        assert len(fields) == 1 and fields[0].startswith(path), (path, fields)
        assert "rank 0=" in told[0][1] and "rank 1=" in told[0][1]
    assert found[0][200:] == ["run"] * 100, "equal starts, in the folder of rank 0"


def test_many_ranks_are_said_compactly():
    runs = [make_run(Path("run")) for _ in range(600)]
    runs[4] = tree.replace_at(runs[4], "optim.lr", 2e-3)
    runs[599] = replace(
        runs[599], model=GPT2Config(vocab_size=67, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    everyone = [identity(run, CPU) for run in runs]
    lr, family = sorted(problems(everyone), key=lambda p: p.field != "optim.lr")
    assert str(lr).startswith(
        "config error: optim.lr=0.003: must be the same on all ranks"
    ) and "ranks 0-3, 5-599=0.003, rank 4=0.002" in str(lr)
    assert family.field == "model.family" and family.because == {"ranks 0-598": "llama", "rank 599": "gpt2"}


def test_versions_and_devices_are_compared():
    here = identity(make_run(Path("run")), CPU)
    there = Identity({**here.values, "versions": {**here.values["versions"], "torch": "1.13"}, "device kind": "cuda"})
    assert [p.field for p in problems([here, there])] == ["device kind", "versions.torch"]


def corpus(prefix: Path, seed: int, tokens: int = 4000) -> str:
    with CorpusWriter(prefix, np.uint16) as writer:
        for part in np.split(np.random.default_rng(seed).integers(0, 67, tokens), 10):
            writer.add_document(part)
    return str(prefix)


def trained(rank: int, world: int, runs: list[Run]) -> tuple[str, list[str]]:
    """How a rank's training ends."""
    try:
        train(runs[rank], Placement(rank, rank, world, ""))
    except PhalanxError as error:
        return type(error).__name__, [p.field for p in error.problems] if isinstance(error, ConfigError) else [
            str(error)
        ]
    return "done", []


def test_paths_are_what_they_hold(ranks, tmp_path):
    """Copies under other names are the same data; one name with other tokens is not, even where size, lengths and
    checksums' absence are alike."""
    for name, seed in (("a/x", 1), ("b/y", 1), ("c/x", 2)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        corpus(tmp_path / name, seed)
    base = replace(make_run(tmp_path / "run", steps=2), log=replace(make_run(tmp_path).log, interval=1))
    a, b, c = (replace(base, data=DataConfig(paths=(str(tmp_path / name),))) for name in ("a/x", "b/y", "c/x"))
    assert (
        ranks.run("tests.engine.test_meeting:trained", 2, [a, replace(b, dir=str(tmp_path / "elsewhere"))])
        == [("done", [])] * 2
    )
    assert not (tmp_path / "elsewhere").exists() and [row["step"] for row in rows_of(a)] == [1, 2]
    other = replace(a, dir=str(tmp_path / "never"))
    assert (
        ranks.run("tests.engine.test_meeting:trained", 2, [other, replace(c, dir=other.dir)])
        == [("ConfigError", ["data.paths"])] * 2
    )
    for prefix in (tmp_path / "a/x", tmp_path / "c/x"):
        Path(f"{prefix}.sums").unlink()  # of another tool: what is read of it still differs
    assert (
        ranks.run("tests.engine.test_meeting:trained", 2, [other, replace(c, dir=other.dir)])
        == [("ConfigError", ["tokens read.windows"])] * 2
    )
    weights = [
        replace(a, dir=other.dir, data=DataConfig(paths=a.data.paths * 2, weights=w)) for w in ((0.5, 0.5), (0.4, 0.6))
    ]
    assert ranks.run("tests.engine.test_meeting:trained", 2, weights) == [("ConfigError", ["data.weights"])] * 2
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    "field, value", [("train.steps", 3), ("model.hidden_size", 32), ("train.precision", "bf16"), ("layout.tp", 2)]
)
def test_what_aborted_in_gloo_is_named(ranks, tmp_path, field, value):
    run = make_run(tmp_path / "run")
    runs = [run, tree.replace_at(run, field, value)]
    assert ranks.run("tests.engine.test_meeting:trained", 2, runs) == [("ConfigError", [field])] * 2
    assert not (tmp_path / "run").exists()


def test_two_commands_that_differ_end_with_2(warm, tmp_path):
    """As on two nodes: each process reads a config of its own."""
    (tmp_path / "run.yaml").write_text(to_yaml(make_run(tmp_path / "run")))
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(Path.cwd()),
    }
    words = [warm.folder / "phalanx", "train", str(tmp_path / "run.yaml")]
    both = [
        subprocess.Popen(
            [*words, f"optim.lr={lr}"],
            env={**env, "RANK": rank, "LOCAL_RANK": rank},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, lr in (("0", 1e-3), ("1", 2e-3))
    ]
    for process in both:
        said = process.communicate(timeout=150)[0]
        assert process.returncode == 2, said
        assert (
            "optim.lr=0.001: must be the same on all ranks" in said
            and "rank 0=0.001, rank 1=0.002" in said
            and "Traceback" not in said
        )
    assert not (tmp_path / "run").exists()


# ---- a start that is refused ---------------------------------------------------------------------


def seen(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("begun") / "run", steps=3)
    train(run, Placement())
    return run


def broken_checkpoint(folder: Path) -> None:
    (folder / "checkpoints" / "step-00000003" / "manifest.json").write_text("{}")


REFUSED = {
    "resume": ("train.seed", 7, CheckpointError),
    "steps": ("train.steps", 2, ConfigError),
    "rule": ("layout.tp", 3, ConfigError),
    "never": ("checkpoint", CheckpointConfig(resume="never"), CheckpointError),
    "damage": (None, None, CheckpointError),
    "data": ("data", DataConfig(paths=("nothing-there",)), DataError),
}


@pytest.mark.trust(
    4,
    "A start that the checkpoints refuse had overwritten config.yaml, so the run could not be continued",
    "nothing in a run's folder changes until the run really starts",
)
@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_start_leaves_the_folder_as_it_was(begun, tmp_path, reason):
    field, value, kind = REFUSED[reason]
    folder = tmp_path / "run"
    shutil.copytree(begun.dir, folder)
    (folder / ".lock").write_text('{"of": "a run that was killed"}')
    run = replace(begun, dir=str(folder))
    if reason == "damage":
        broken_checkpoint(folder)
    before = seen(folder)
    with pytest.raises(kind):
        train(run if field is None else tree.replace_at(run, field, value), Placement())
    assert seen(folder) == before
    if reason != "damage":
        train(replace(run, train=replace(run.train, steps=4)), Placement())
        assert rows_of(run)[-1]["step"] == 4 and load_run(folder / "config.yaml").train.steps == 4
        assert "continue from" in (folder / "log.txt").read_text(), (
            "what is said before the run starts is in its log too"
        )


@pytest.mark.parametrize("steps, data", [(0, DataConfig(mock=True)), (3, DataConfig(mock=True, tokenizer="bytes"))])
def test_a_refused_start_makes_no_folder(tmp_path, steps, data):
    """The second is found out when the run's folder is locked already: its tokenizer has more ids than the model."""
    with pytest.raises(PhalanxError):
        train(
            replace(
                make_run(tmp_path / "a" / "b" / "run", steps=steps),
                data=data,
                model=replace(make_run(tmp_path).model, vocab_size=67),
                init_from=None if steps == 0 else "nothing-there",
            ),
            Placement(),
        )
    assert not (tmp_path / "a").exists()


def test_a_lock_that_is_not_kept_leaves_nothing(tmp_path):
    with FolderLock(tmp_path / "x" / "y"):
        assert (tmp_path / "x" / "y" / ".lock").exists()
    assert not (tmp_path / "x").exists()
    with FolderLock(tmp_path / "x" / "y") as lock:
        (tmp_path / "x" / "else").write_text("")
    assert seen(tmp_path) == {"x": None, "x/else": b""}
    with FolderLock(tmp_path / "x" / "y") as lock:
        lock.keep()
    assert (tmp_path / "x" / "y" / ".lock").read_bytes() == b""


@pytest.mark.trust(
    5,
    "phalanx train with train.steps below the step of its checkpoint: done, exit 0, nothing trained",
    "exit 2, with both numbers",
)
def test_fewer_steps_than_the_checkpoint_has(begun):
    with pytest.raises(ConfigError) as caught:
        train(replace(begun, train=replace(begun.train, steps=2)), Placement())
    [problem] = caught.value.problems
    assert (
        problem.field == "train.steps"
        and problem.value == 2
        and problem.because["step of the checkpoint"] == 3
        and problem.valid == (3,)
    )
    train(begun, Placement())  # as many: there is nothing left to do


# ---- Python is checked like the command line -----------------------------------------------------

WRONG = ["layout.tp=3", "optim.lr=-1", "train.global_batch=7", "train.tokens=1M"]


@pytest.mark.trust(
    23,
    "train(run, ...) in a notebook with layout.tp=3: ZeroDivisionError, and a folder was left",
    "the same problems with the same text as on the command line, as one exception, before any file",
)
def test_python_is_checked_like_the_command_line(warm, tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "run.yaml").write_text(to_yaml(run))
    wrong = load_run(tmp_path / "run.yaml", WRONG)
    with pytest.raises(ConfigError) as caught:
        train(wrong, Placement())
    assert {p.field for p in caught.value.problems} >= {"layout.tp", "optim.lr", "train.tokens"}
    with pytest.raises(ConfigError) as planned:
        px.plan(wrong, 1)
    done = warm.phalanx("train", str(tmp_path / "run.yaml"), "--ranks", "1", *WRONG)
    said = [line.partition(" (set in ")[0] for line in done.stderr.splitlines() if line.startswith("config error")]
    assert done.returncode == 2 and said == str(caught.value).splitlines() == str(planned.value).splitlines()
    assert not (tmp_path / "run").exists()


# ---- train.tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, count",
    [
        ("15B", 15 * 10**9),
        (1.5e9, 1_500_000_000),
        ("1.5e9", 1_500_000_000),
        ("300M", 300_000_000),
        ("2_000_000", 2_000_000),
        ("0.5k", 500),
        (7, 7),
        ("1.5T", 1_500_000_000_000),
        ("1.0001k", "1.0001k"),
        ("15X", "15X"),
        (True, True),
        ("-5", "-5"),
        (float("inf"), float("inf")),
        (1.5, 1.5),
    ],
)
def test_token_counts(given, count):
    assert token_count(given) == count and type(token_count(given)) is type(count)


@pytest.mark.trust(
    19,
    "train.tokens=15B: no such key; the number of steps had to be worked out by hand",
    "15B, 1.5e9 or 300M are rounded up to whole steps, whose number is printed; with train.steps as well it is refused",
)
@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_as_many_steps_as_are_needed(tmp_path, seed):
    """The least number of steps by which so many tokens are consumed, ramp-up included."""
    dice = random.Random(seed)
    ramp = RampConfig(start=2, increment=dice.choice([2, 3, 6]), samples=dice.randrange(1, 200)) if seed % 4 else None
    settings = {"steps": None, "tokens": dice.randrange(1, 30_000), "global_batch": 8, "rampup": ramp}
    run = make_run(tmp_path, **settings)
    consumed = [total_samples(run, stop=step) * 16 for step in (run.train.last_step - 1, run.train.last_step)]
    assert consumed[0] < run.train.tokens <= consumed[1]
    recomputed = load_run(base=json.loads(json.dumps(asdict(run))))
    assert recomputed == run and recomputed.train.last_step == run.train.last_step


def test_a_run_of_tokens_trains_resumes_and_reloads(tmp_path, warm):
    (tmp_path / "run.yaml").write_text(
        to_yaml(replace(make_run(tmp_path / "run"), train=replace(make_run(tmp_path).train, steps=None)))
    )
    done = warm.phalanx("train", str(tmp_path / "run.yaml"), "train.tokens=0.3k", "layout.sharding=0")
    assert done.returncode == 0 and "steps=3 " in done.stdout and "done step=3" in done.stdout, (
        done.stdout + done.stderr
    )
    resolved = load_run(tmp_path / "run" / "config.yaml")
    assert resolved.train.tokens == 300 and resolved.train.steps is None
    train(replace(resolved, train=replace(resolved.train, tokens=500)), Placement())
    assert rows_of(resolved)[-1]["step"] == 4
    with pytest.raises(ConfigError, match="step of the checkpoint.*=4"):
        train(resolved, Placement())
    both = warm.phalanx("plan", str(tmp_path / "run.yaml"), "train.tokens=15B", "train.steps=40")
    assert both.returncode == 2 and both.stderr.count("config error") == 1
    assert "train.tokens=15000000000: excludes train.steps" in both.stderr and "train.steps=40" in both.stderr
    planned = warm.phalanx("plan", str(tmp_path / "run.yaml"), "train.tokens=1.5e9")
    assert planned.returncode == 0 and f"{-(-1_500_000_000 // 128):,} steps" in planned.stdout
    neither = warm.phalanx("plan", str(tmp_path / "run.yaml"))
    assert neither.returncode == 2 and "train.tokens=15B" in neither.stderr


def test_a_layout_in_python_is_refused_before_ranks_meet():
    with pytest.raises(ConfigError, match="layout.tp"):
        px.plan(replace(make_run(Path("run")), layout=LayoutConfig(tp=3)), 1)
