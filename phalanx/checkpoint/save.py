"""Save a checkpoint: all ranks write into a temporary folder, rank 0 seals it with a manifest and renames it. Before that it is nothing.

A crash at any point leaves the earlier checkpoints untouched and at most a temporary folder, which the next save removes.
`collect` needs the run's memory, `write` only what was collected: with a copy of it (`copied`) training goes on meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.agree import agree
from phalanx.checkpoint.gather import File, Held, gather, plan_files
from phalanx.checkpoint.hf import ModelConfig, generation_config, to_hf
from phalanx.checkpoint.holdings import KINDS, Item, kept_to_save, state_to_save, weights_to_save
from phalanx.checkpoint.host import HostCopies
from phalanx.checkpoint.keep import Keep, remove_leftovers, retain, step_name
from phalanx.checkpoint.manifest import NAME, Manifest, verify
from phalanx.checkpoint.objects import storage_for
from phalanx.checkpoint.places import is_remote, place
from phalanx.checkpoint.storage import Receipt, Storage, remove_tree, write_file
from phalanx.checkpoint.tensors import DTYPES, NAMES, TensorFile, check_file
from phalanx.comm.axis import Axis
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
    parent      step of the run's checkpoint before this one
    """

    step: int
    consumed_samples: int
    model: ModelConfig
    config: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    token_ids: dict[str, int] = field(default_factory=dict)
    parent: int | None = None


@dataclass(frozen=True)
class Saved:
    """Where the checkpoint is; `written` is false if a good one of that step was already there; `warnings` of its upkeep."""

    path: Path
    written: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """Where checkpoints go, and how.

    keep        which ones retention spares; protect: and these (the one that the run was resumed from)
    check       asked on rank 0 before anything is written: CheckpointError where the root is no longer the run's
    """

    root: Path
    storage: Storage
    keep: Keep = Keep()
    protect: tuple[Path, ...] = ()
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Content:
    """This rank's part of a checkpoint.

    files       weight files of all ranks; weights: the tensors of those that this rank writes, in their order
    state       this rank's boxes of masters and moments, by kind; kept: those of what is not trained
    scalars     of the optimizer, the scaler and others, small: on the device until they are copied
    needed      bytes that this rank will write; gathered: those of the weights among them, each in a tensor made for the save
    """

    snapshot: Snapshot
    layout: dict[str, int]
    dtype: torch.dtype
    files: list[File]
    weights: Iterable[tuple[File, Tensor]]
    state: list[tuple[str, Item]]
    kept: list[Item]
    scalars: dict[str, Tensor]
    needed: int
    gathered: int


def save(root: str | Path, snapshot: Snapshot, buffers: Buffers, optimizer: AdamW, scaler: LossScaler, mesh: Mesh, *, keep: Keep | None = None,
         protect: Iterable[str | Path] = (), storage: Storage | None = None, max_file_bytes: int = MAX_FILE_BYTES) -> Saved:  # fmt: skip
    """Save to `root/step-XXXXXXXX/`. Called by all ranks together, on one shared file system, after the step's update.

    Raises CheckpointError on every rank if any rank could not write; what was there before is then still there.
    """
    root = place(root)
    target = Target(root, storage or storage_for(root), keep or Keep(), tuple(place(p) for p in protect))
    return write(collect(snapshot, buffers, optimizer, scaler, mesh, max_file_bytes), target, mesh.world)


def collect(snapshot: Snapshot, buffers: Buffers, optimizer: AdamW, scaler: LossScaler, mesh: Mesh, max_file_bytes: int,
            more: Mapping[str, Tensor] | None = None, files: list[File] | None = None) -> Content:  # fmt: skip
    """What this rank will write, as views of the run's memory; weights are gathered tensor by tensor as they are asked for.

    more: small tensors, equal on all ranks, that go into the manifest as `float.hex`. files: of an earlier save, if ranks need not agree anew.
    """
    buffers.ready()
    weights, state, kept = weights_to_save(buffers, mesh), state_to_save(optimizer.shards, mesh), kept_to_save(buffers, mesh)
    dtype = next(f.weight.dtype for f in buffers.flat if f.bucket.trained)
    files = files or _plan(mesh.world, weights, max_file_bytes)
    jobs = [job for file in files if file.writer == mesh.world.index for job in file.jobs]
    return Content(
        snapshot, {**dataclasses.asdict(mesh.grid), "world": mesh.world.size}, dtype, files,
        gather(mesh.world, files, weights, mesh.device), [(kind, i) for kind in KINDS for i in state[kind]], kept,
        {"optimizer.step": optimizer.step, **{f"scaler.{k}": v for k, v in scaler.state().items()}, **(more or {})},
        sum(i.box.numel * i.view.element_size() for items in (weights, kept, *state.values()) for i in items),
        sum(Box.full(job.shape).numel * job.dtype.itemsize for job in jobs),
    )  # fmt: skip


def copied(content: Content, host: HostCopies) -> Content:
    """The same in memory of the host. Ranks call it together; after `host.release` the run's memory may change."""
    host.begin(content.gathered)
    made = dataclasses.replace(
        content,
        weights=[(file, host.copy(tensor, fresh=True)) for file, tensor in content.weights],
        state=[(kind, dataclasses.replace(item, view=host.copy(item.view))) for kind, item in content.state],
        kept=[dataclasses.replace(item, view=host.copy(item.view)) for item in content.kept],
        scalars={name: host.copy(value) for name, value in content.scalars.items()},
    )
    host.mark()
    return made


def _plan(world: Axis, items: list[Item], max_file_bytes: int) -> list[File]:
    """Ranks tell each other which boxes they offer; each then makes the same list of files and writers."""
    offers = agree(world, lambda: [(i.name, i.shape, i.box.start, i.box.stop, NAMES[i.view.dtype]) for i in items])
    held: list[list[Held]] = [[(name, tuple(shape), Box(tuple(a), tuple(b)), DTYPES[t]) for name, shape, a, b, t in rank] for rank in offers]
    return plan_files(held, max_file_bytes)


def write(content: Content, target: Target, axis: Axis) -> Saved:
    """Write what every rank of the axis collected, and tidy up. Of a copy this may be called in another thread, with an axis of its own."""
    final, storage = target.root / step_name(content.snapshot.step), target.storage
    folder, warnings = _begin(final, content.needed, target, axis)
    if folder is None:
        return Saved(final, False, tuple(warnings))
    try:
        written = [_write_weights(folder, content, axis, storage), _write_state(folder, content, axis, storage)]
        mine = {name: receipt for part in written for name, receipt in part[axis.index].items()}
        agree(axis, lambda: _read_back(folder, mine))
        files = {name: receipt for part in written for rank in part for name, receipt in rank.items()}
        agree(axis, lambda: _commit(folder, final, _manifest(content, files), storage) if axis.index == 0 else None)
    except CheckpointError:
        if axis.index == 0:
            with suppress(OSError):  # gives back the room; what cannot be removed now, the next save removes
                remove_tree(storage, folder)
        raise
    warnings += agree(axis, lambda: _tidy(target) if axis.index == 0 else None)[0]
    return Saved(final, True, tuple(warnings))


def _tidy(target: Target) -> list[str]:
    """Remove what the new checkpoint replaces."""
    return remove_leftovers(target.root, target.storage) + retain(target.root, target.keep, target.storage, target.protect)


def _begin(final: Path, needed: int, target: Target, axis: Axis) -> tuple[Path | None, list[str]]:
    """Make the temporary folder (none if a good checkpoint of this step is there already); what could not be tidied up first."""
    needed = sum(agree(axis, lambda: needed))
    name, warnings = agree(axis, lambda: _make_folder(final, needed, target) if axis.index == 0 else None)[0]
    if name is None:
        return None, warnings
    folder = final.with_name(name)

    def look() -> None:
        if not is_remote(folder) and not (folder / "weights").is_dir():
            raise CheckpointError(f"{folder}, which rank 0 made, is not there: checkpoints need a folder that all nodes share")

    agree(axis, look)
    return folder, warnings


def _make_folder(final: Path, needed: int, target: Target) -> tuple[str | None, list[str]]:
    target.check()
    storage = target.storage
    warnings = remove_leftovers(final.parent, storage)
    if final.exists() and not verify(final):
        return None, warnings  # committed folders are never written to
    folder = storage.begin(final)
    free = storage.free(folder)
    if free is not None and free < needed:
        remove_tree(storage, folder)
        raise CheckpointError(f"not enough room for the checkpoint {final}: it needs {needed} bytes, {free} are free")
    return folder.name, warnings


Receipts = list[dict[str, Receipt]]  # of the files of each rank


def _write_weights(folder: Path, content: Content, axis: Axis, storage: Storage) -> Receipts:
    outputs = dict[str, TensorFile]()
    for file, tensor in content.weights:
        if file.name not in outputs:
            entries = [(job.name, job.shape, job.dtype) for job in file.jobs]
            outputs[file.name] = TensorFile(storage, folder / "weights" / file.name, entries)
        outputs[file.name].add(tensor)

    def finish() -> dict[str, dict[str, Any]]:
        try:
            receipts = {f"weights/{name}": output.finish() for name, output in outputs.items()}
            if axis.index == 0:
                receipts.update(_write_beside_weights(folder / "weights", content.files, content.snapshot, content.dtype, storage))
        finally:
            for output in outputs.values():
                output.close()
        return {name: dataclasses.asdict(r) for name, r in receipts.items()}

    return _receipts(agree(axis, finish))


def _receipts(ranks: list[dict[str, dict[str, Any]]]) -> Receipts:
    return [{name: Receipt(**r) for name, r in rank.items()} for rank in ranks]


def _write_beside_weights(folder: Path, files: list[File], snapshot: Snapshot, dtype: torch.dtype, storage: Storage) -> dict[str, Receipt]:
    """What makes a Hugging Face folder of the weights: configs, index of a sharded model, tokenizer."""
    texts: dict[str, bytes] = {
        "config.json": _json(to_hf(snapshot.model, dtype, snapshot.token_ids)),
        "generation_config.json": _json(generation_config(snapshot.token_ids)),
        **tokenizer_files(snapshot.tokenizer),
    }
    if len(files) > 1:
        where = {job.name: f.name for f in files for job in f.jobs}
        size = sum(Box.full(job.shape).numel * job.dtype.itemsize for f in files for job in f.jobs)
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


def _write_state(folder: Path, content: Content, axis: Axis, storage: Storage) -> Receipts:
    """Each rank writes its masters and moments, and what is not trained, to a file of its own; rank 0 adds the index of all boxes."""
    name, items = f"state/rank-{axis.index:05d}.safetensors", [*content.state, *((KINDS[0], i) for i in content.kept)]

    def write() -> dict[str, Any]:
        if not items:
            return {"files": {}, "boxes": [], "kept": []}
        output = TensorFile(storage, folder / name, [(key_of(kind, i.name, i.box), i.box.shape, i.view.dtype) for kind, i in items])
        try:
            for _, item in items:
                output.add(item.view)
            receipt = output.finish()
        finally:
            output.close()
        boxes, kept = [i for kind, i in content.state if kind == KINDS[0]], content.kept
        return {"files": {name: dataclasses.asdict(receipt)}, "boxes": [_place(i) for i in boxes], "kept": [_place(i) for i in kept]}

    answers = agree(axis, write)

    def index() -> dict[str, Any]:
        tables = {what: {file: a[what] for a in answers for file in a["files"]} for what in ("boxes", "kept")}
        text = json.dumps({"kinds": KINDS, "files": tables["boxes"], "kept": tables["kept"]}, separators=(",", ":")).encode()
        return dataclasses.asdict(write_file(storage, folder / "state/index.json", [text]))

    receipts = _receipts([a["files"] for a in answers])
    receipts[0]["state/index.json"] = Receipt(**agree(axis, lambda: index() if axis.index == 0 else None)[0])
    return receipts


def _place(item: Item) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return item.name, item.shape, item.box.start, item.box.stop


def _read_back(folder: Path, receipts: dict[str, Receipt]) -> None:
    """What a rank wrote is what it meant to write. Of object storage the size is asked: its client sends checksums along."""
    for name, receipt in receipts.items():
        path = folder / name
        try:
            if path.stat().st_size != receipt.size:
                raise DamagedCheckpoint(f"it has {path.stat().st_size} bytes instead of {receipt.size}")
            if not is_remote(path):
                check_file(path, receipt)
        except DamagedCheckpoint as error:
            raise CheckpointError(f"{path} does not read back as it was written: the disk or the memory is bad ({error})") from error


def _manifest(content: Content, files: dict[str, Receipt]) -> Manifest:
    snapshot = content.snapshot
    return Manifest(
        step=snapshot.step, consumed_samples=snapshot.consumed_samples, parent=snapshot.parent, model=dataclasses.asdict(snapshot.model),
        config=snapshot.config, layout=content.layout, scalars=snapshot.scalars,
        optimizer={name: hex_of(value) for name, value in content.scalars.items()}, files=dict(sorted(files.items())),
    )  # fmt: skip


def hex_of(values: Tensor) -> str:
    """Numbers in a form that is read back exactly."""
    return " ".join(float(x).hex() for x in values.flatten().tolist())


def _commit(folder: Path, final: Path, manifest: Manifest, storage: Storage) -> None:
    write_file(storage, folder / NAME, [manifest.text().encode()])
    storage.commit(folder, final)
