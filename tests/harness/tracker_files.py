"""What TensorBoard and Weights & Biases have of a run, read back from their files; and a whole run to read, for any
version of the packages.

    python -m tests.harness.tracker_files tensorboard|wandb FOLDER

trains a model with experts in FP8, stops, goes on, and compares the tracker's files with metrics.jsonl.
tests/observe/test_trackers.py calls it in environments that have other versions.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.base.placement import Placement
from phalanx.base.records import Record, Row
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.config.run import Fp8Config, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.models.qwen3_moe import Qwen3MoEConfig
from phalanx.observe import run_records
from phalanx.optim.config import OptimConfig
from phalanx.training.main import train

MODEL = Qwen3MoEConfig(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
)
WANDB = {
    "wandb": "phalanx-tests",
    "wandb_entity": "a-team",
    "wandb_name": "the name",
    "wandb_group": "a group",
    "wandb_tags": ["one", "two"],
}
STEPS = 7


def expert_run(folder: Path, **log: Any) -> Run:
    fp8 = Fp8Config(recipe="tensorwise", shadow_interval=3)
    settings = TrainConfig(
        steps=STEPS,
        global_batch=4,
        micro_batch=4,
        seq_length=16,
        device="cpu",
        precision="bf16",
        fp8=fp8,
        eval_interval=4,
    )
    return Run(
        model=MODEL,
        train=settings,
        data=DataConfig(mock=True),
        optim=OptimConfig(lr=3e-3, decay_steps=STEPS),
        checkpoint=CheckpointConfig(interval=3),
        log=LogConfig(report=False, **log),
        dir=str(folder),
    )


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def row_of(values: dict) -> Row:
    """A row of metrics.jsonl with the records that it was made of."""
    known = {record.name: record for record in vars(run_records).values() if isinstance(record, Record)}
    named = {known.get(name, Record(name)): value for name, value in values.items() if name != "step"}
    return Row(values["step"], named)


def numbers_by_step(rows: list[dict]) -> dict[tuple[str, int], float]:
    """(name, step) -> number, of every number of these rows."""
    return {(name, row["step"]): value for row in rows for name, value in row_of(row).scalars().items()}


def equal(found: dict[tuple[str, int], float], wanted: dict[tuple[str, int], float], digits: float) -> list[str]:
    """What differs; a number that is not one equals another that is not."""
    wrong = [f"only one has {name}" for name in found.keys() ^ wanted.keys()]
    for name in found.keys() & wanted.keys():
        a, b = found[name], wanted[name]
        if not (math.isclose(a, b, rel_tol=digits, abs_tol=1e-30) or (math.isnan(a) and math.isnan(b))):
            wrong.append(f"{name}: {a} is not {b}")
    return wrong


# ---- TensorBoard ---------------------------------------------------------------------------------


def board_numbers(folder: Path) -> dict[tuple[str, int], float]:
    """As TensorBoard itself reads its folder, which leaves out what was taken back."""
    events = _events(folder)
    return {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}


def board_texts(folder: Path) -> dict[str, str]:
    """Tag -> last text."""
    events = _events(folder)
    return {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


# ---- Weights & Biases ----------------------------------------------------------------------------

BLOCK, HEADER = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, in the package's own types: a file header, then LevelDB's log format (checksum,
    length, type, bytes)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK  # a block ends in zeros where no header fits
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        assert kind in (FULL, FIRST, MIDDLE, LAST), f"{path}: no record at byte {at}"
        parts = (parts if kind in (MIDDLE, LAST) else b"") + data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record


def wandb_runs(folder: Path) -> list[list[Any]]:
    """The records of each start of a run, the first one first."""
    return [
        list(wandb_records(path))
        for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    ]


def wandb_rows(records: list[Any]) -> list[dict[str, Any]]:
    """What was logged, row by row."""
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]


def wandb_numbers(rows: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """(name, step) -> number. Rows that go back to an earlier step replace all that came from there on."""
    found: dict[tuple[str, int], float] = {}
    last = 0
    for row in rows:
        if row["step"] < last:
            found = {key: value for key, value in found.items() if key[1] < row["step"]}
        last = row["step"]
        for name, value in row.items():
            if name != "step" and name != "rollbacks" and not name.startswith("_") and isinstance(value, (int, float)):
                found[name, row["step"]] = float(value)
            elif value in ("NaN", "Infinity", "-Infinity"):
                found[name, row["step"]] = float(value.replace("Infinity", "inf"))
    return found


# ---- a whole run ---------------------------------------------------------------------------------


def train_twice(kind: str, folder: Path) -> None:
    """Train, stop, and continue from an earlier step than was reached."""
    run = expert_run(folder, **({"tensorboard": True} if kind == "tensorboard" else WANDB))
    train(replace(run, train=replace(run.train, steps=5)), Placement())
    (folder / "checkpoints/step-00000005").rename(
        folder / "gone"
    )  # as if the run had been killed after step 5 and before that save
    train(run, Placement())


def compare(kind: str, folder: Path) -> int:
    """A tracker's files with metrics.jsonl. How many numbers were compared."""
    wanted = numbers_by_step(rows_of(folder))
    if kind == "tensorboard":
        found = board_numbers(folder / "tb")
    else:
        found = wandb_numbers([row for records in wandb_runs(folder) for row in wandb_rows(records)])
    problems = equal(found, wanted, 1e-6 if kind == "tensorboard" else 1e-12)
    assert not problems, problems[:10]
    names = {name for name, _ in wanted}
    assert names > {
        "loss",
        "valid/valid",
        "experts/entropy/layer-1",
        "fp8/amax/weights/model.layers.0.self_attn.o_proj",
    }, sorted(names)[:40]
    if kind == "tensorboard":
        assert (
            board_texts(folder / "tb")["fp8_worst"]
            == [row_of(row).texts()["fp8_worst"] for row in rows_of(folder) if "fp8_worst" in row][-1]
        )
    else:
        check_identity(folder)
    return len(wanted)


def check_identity(folder: Path) -> None:
    """Both starts are one run of W&B, with everything that the config says of it."""
    starts = wandb_runs(folder)
    assert len(starts) == 2
    for records in starts:
        begun = next(r.run for r in records if r.HasField("run"))
        named = [getattr(begun, key) for key in ("run_id", "project", "entity", "display_name", "run_group")]
        assert named == [
            (folder / "wandb-id.txt").read_text(),
            *(WANDB[k] for k in ("wandb", "wandb_entity", "wandb_name", "wandb_group")),
        ]
        assert list(begun.tags) == WANDB["wandb_tags"]


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    train_twice(kind, folder)
    print(f"{compare(kind, folder)} numbers equal")
