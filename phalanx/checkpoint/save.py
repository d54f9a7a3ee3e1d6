"""Save a checkpoint: all ranks write into a temporary folder, rank 0 seals it with a manifest and renames it. Before that it is nothing.

A crash at any point leaves the earlier checkpoints untouched and at most a temporary folder, which the next save removes.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.agree import agree
from phalanx.checkpoint.gather import File, Held, gather, plan_files
from phalanx.checkpoint.hf import ModelConfig, generation_config, to_hf
from phalanx.checkpoint.holdings import KINDS, Item, state_to_save, weights_to_save
from phalanx.checkpoint.keep import remove_leftovers, retain, step_name, temporary
from phalanx.checkpoint.manifest import NAME, Manifest, verify
from phalanx.checkpoint.storage import Receipt, Storage, remove_tree, write_file
from phalanx.checkpoint.tensors import TensorFile
from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.buffers import Buffers
from phalanx.layout.box import Box
from phalanx.optim.adamw import AdamW
from phalanx.optim.scaler import LossScaler

MAX_FILE_BYTES = 4 << 30
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint says beside its tensors; the same on every rank.

    config      the whole resolved config as JSON values; its hash goes into the manifest
    scalars     the loop's counters (JSON values; floats come back bit-exact)
    tokenizer   a tokenizer.json or a folder with tokenizer files, copied beside the weights
    token_ids   bos_token_id, eos_token_id, pad_token_id, as far as there are any
    """

    step: int
    consumed_samples: int
    model: ModelConfig
    config: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    token_ids: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """Where the checkpoint is; `written` is false if a good one of that step was already there; `warnings` of its upkeep."""

    path: Path
    written: bool
    warnings: tuple[str, ...] = ()


def save(root: str | Path, snapshot: Snapshot, buffers: Buffers, optimizer: AdamW, scaler: LossScaler, mesh: Mesh, *, keep_last: int = 2,
         protect: Iterable[str | Path] = (), storage: Storage | None = None, max_file_bytes: int = MAX_FILE_BYTES) -> Saved:  # fmt: skip
    """Save to `root/step-XXXXXXXX/`. Called by all ranks together, on one shared file system, after the step's update.

    protect: checkpoints that retention must spare (the one that the run was resumed from). Raises CheckpointError on every
    rank if any rank could not write; what was there before is then still there.
    """
    root, storage = Path(root), storage or Storage()
    final = root / step_name(snapshot.step)
    buffers.ready()
    shares = {"weights": weights_to_save(buffers, mesh), **state_to_save(optimizer.shards, mesh)}
    files = _plan(mesh, shares["weights"], buffers, max_file_bytes)
    folder, warnings = _begin(root, final, mesh, storage, shares)
    if folder is None:
        return Saved(final, False, tuple(warnings))
    try:
        written = _write_weights(folder, files, shares["weights"], snapshot, buffers, mesh, storage)
        written.update(_write_state(folder, shares, mesh, storage))
        manifest = _manifest(snapshot, optimizer, scaler, mesh, written)
        agree(mesh.world, lambda: _commit(folder, final, manifest, storage) if mesh.rank == 0 else None)
    except CheckpointError:
        if mesh.rank == 0:
            with suppress(OSError):  # gives back the room; what cannot be removed now, the next save removes
                remove_tree(storage, folder)
        raise
    spared = [Path(p) for p in protect]
    warnings += agree(mesh.world, lambda: retain(root, keep_last, storage, spared) if mesh.rank == 0 else None)[0]
    return Saved(final, True, tuple(warnings))


def _plan(mesh: Mesh, items: list[Item], buffers: Buffers, max_file_bytes: int) -> list[File]:
    """Ranks tell each other which boxes they offer; each then makes the same list of files and writers."""
    offers = agree(mesh.world, lambda: [(i.name, i.shape, i.box.start, i.box.stop) for i in items])
    held: list[list[Held]] = [[(name, tuple(shape), Box(tuple(a), tuple(b))) for name, shape, a, b in rank] for rank in offers]
    return plan_files(held, _dtype(buffers).itemsize, max_file_bytes)


def _dtype(buffers: Buffers) -> torch.dtype:
    return buffers.flat[0].weight.dtype


def _begin(root: Path, final: Path, mesh: Mesh, storage: Storage, shares: dict[str, list[Item]]) -> tuple[Path | None, list[str]]:
    """Make the temporary folder (none if a good checkpoint of this step is there already); what could not be tidied up first."""
    needed = sum(agree(mesh.world, lambda: sum(i.box.numel * i.view.element_size() for items in shares.values() for i in items)))
    name, warnings = agree(mesh.world, lambda: _make_folders(root, final, needed, storage) if mesh.rank == 0 else None)[0]
    if name is None:
        return None, warnings
    folder = root / name

    def look() -> None:
        if not (folder / "weights").is_dir():
            raise CheckpointError(f"{folder}, which rank 0 made, is not there: checkpoints need a folder that all nodes share")

    agree(mesh.world, look)
    return folder, warnings


def _make_folders(root: Path, final: Path, needed: int, storage: Storage) -> tuple[str | None, list[str]]:
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        storage.sync_folder(root.parent)
    warnings = remove_leftovers(root, storage)
    if final.exists() and not verify(final):
        return None, warnings  # committed folders are never written to
    free = shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(f"not enough room for the checkpoint {final}: it needs {needed} bytes, {free} are free")
    folder = temporary(final, "new")
    for made in (folder, folder / "weights", folder / "state"):
        storage.make_folder(made)
    return folder.name, warnings


def _write_weights(folder: Path, files: list[File], items: list[Item], snapshot: Snapshot, buffers: Buffers, mesh: Mesh,
                   storage: Storage) -> dict[str, Receipt]:  # fmt: skip
    dtype, mine = _dtype(buffers), [f for f in files if f.writer == mesh.rank]
    outputs: dict[str, TensorFile] = {}
    for file, tensor in gather(mesh.world, files, items, dtype, mesh.device):
        if file.name not in outputs:
            entries = [(job.name, job.shape) for job in file.jobs]
            outputs[file.name] = TensorFile(storage, folder / "weights" / file.name, entries, dtype)
        outputs[file.name].add(tensor)

    def finish() -> dict[str, dict[str, Any]]:
        try:
            receipts = {f"weights/{f.name}": outputs[f.name].finish() for f in mine}
            if mesh.rank == 0:
                receipts.update(_write_beside_weights(folder / "weights", files, snapshot, dtype, storage))
        finally:
            for output in outputs.values():
                output.close()
        return {name: dataclasses.asdict(r) for name, r in receipts.items()}

    return _receipts(agree(mesh.world, finish))


def _receipts(ranks: list[dict[str, dict[str, Any]]]) -> dict[str, Receipt]:
    return {name: Receipt(**r) for rank in ranks for name, r in rank.items()}


def _write_beside_weights(folder: Path, files: list[File], snapshot: Snapshot, dtype: torch.dtype, storage: Storage) -> dict[str, Receipt]:
    """What makes a Hugging Face folder of the weights: configs, index of a sharded model, tokenizer."""
    texts: dict[str, bytes] = {
        "config.json": _json(to_hf(snapshot.model, dtype, snapshot.token_ids)),
        "generation_config.json": _json(generation_config(snapshot.token_ids)),
        **tokenizer_files(snapshot.tokenizer),
    }
    if len(files) > 1:
        where = {job.name: f.name for f in files for job in f.jobs}
        size = sum(Box.full(job.shape).numel for f in files for job in f.jobs) * dtype.itemsize
        texts["model.safetensors.index.json"] = _json({"metadata": {"total_size": size}, "weight_map": where})
    return {f"weights/{name}": write_file(storage, folder / name, [text]) for name, text in texts.items()}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def tokenizer_files(path: str | None) -> dict[str, bytes]:
    """Contents of the tokenizer's files by name. A lone tokenizer.json gets the config that `AutoTokenizer` asks for."""
    if path is None:
        return {}
    given = Path(path)
    if given.is_dir():
        found = {name: (given / name).read_bytes() for name in TOKENIZER_FILES if (given / name).is_file()}
    else:
        found = {"tokenizer.json" if given.suffix == ".json" else given.name: given.read_bytes()}
    if "tokenizer.json" in found and "tokenizer_config.json" not in found:
        found["tokenizer_config.json"] = _json({"tokenizer_class": "PreTrainedTokenizerFast"})
    return found


def key_of(kind: str, name: str, box: Box) -> str:
    """Name of a box in a state file, unique over kinds and boxes."""
    return f"{kind}/{name}[" + ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop)) + "]"


def _write_state(folder: Path, shares: dict[str, list[Item]], mesh: Mesh, storage: Storage) -> dict[str, Receipt]:
    """Each rank writes its masters and moments to a file of its own; rank 0 adds the index of all boxes."""
    name = f"state/rank-{mesh.rank:05d}.safetensors"
    items = [(kind, i) for kind in KINDS for i in shares[kind]]

    def write() -> dict[str, Any]:
        if not items:
            return {"files": {}, "boxes": []}
        entries = [(key_of(kind, i.name, i.box), i.box.shape) for kind, i in items]
        output = TensorFile(storage, folder / name, entries, items[0][1].view.dtype)
        try:
            for _, item in items:
                output.add(item.view)
            receipt = output.finish()
        finally:
            output.close()
        boxes = [(i.name, i.shape, i.box.start, i.box.stop) for i in shares["master"]]
        return {"files": {name: dataclasses.asdict(receipt)}, "boxes": boxes}

    answers = agree(mesh.world, write)
    receipts = _receipts([a["files"] for a in answers])

    def index() -> dict[str, Any]:
        table = {file: a["boxes"] for a in answers for file in a["files"]}
        text = json.dumps({"kinds": KINDS, "files": table}, separators=(",", ":")).encode()
        return dataclasses.asdict(write_file(storage, folder / "state/index.json", [text]))

    return {**receipts, "state/index.json": Receipt(**agree(mesh.world, lambda: index() if mesh.rank == 0 else None)[0])}


def _manifest(snapshot: Snapshot, optimizer: AdamW, scaler: LossScaler, mesh: Mesh, files: dict[str, Receipt]) -> Manifest:
    device = {"optimizer.step": optimizer.step, **{f"scaler.{k}": v for k, v in scaler.state().items()}}
    return Manifest(
        step=snapshot.step, consumed_samples=snapshot.consumed_samples, model=dataclasses.asdict(snapshot.model), config=snapshot.config,
        layout={**dataclasses.asdict(mesh.grid), "world": mesh.world.size}, scalars=snapshot.scalars,
        optimizer={name: float(value.item()).hex() for name, value in device.items()}, files=dict(sorted(files.items())),
    )  # fmt: skip


def _commit(folder: Path, final: Path, manifest: Manifest, storage: Storage) -> None:
    """Everything in the folder is on disk before it gets its name, and the name is on disk before anything older goes."""
    write_file(storage, folder / NAME, [manifest.text().encode()])
    for made in (folder / "weights", folder / "state", folder):
        storage.sync_folder(made)
    if final.exists():  # a damaged one: `_begin` has looked
        storage.rename(final, temporary(final, "bad"))
    storage.rename(folder, final)
    storage.sync_folder(final.parent)

