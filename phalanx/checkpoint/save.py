"""Save a checkpoint: all ranks write into a temporary folder, then rank 0 seals it with a manifest and renames it.
Until then it is not a checkpoint.

A crash at any point leaves the earlier checkpoints untouched and at most a temporary folder, which the next save
removes. `collect` needs the run's memory; `write` needs only what was collected, so with a copy of it (`copied`)
training continues meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.adapters import CONFIG, FILE, FOLDER, peft_names
from phalanx.checkpoint.agree import agree
from phalanx.checkpoint.boxes import (
    Item,
    adapters_to_save,
    frozen_names,
    kept_to_save,
    state_to_save,
    weights_to_save,
    whole_weights,
)
from phalanx.checkpoint.exchange import offered
from phalanx.checkpoint.gather import File, gather, plan_files, written_where_whole
from phalanx.checkpoint.hf import generation_config, to_hf
from phalanx.checkpoint.hf_files import INDEX
from phalanx.checkpoint.host import HostCopies, room
from phalanx.checkpoint.keep import Keep, held_step, remove_leftovers, retain, step_name, step_of
from phalanx.checkpoint.manifest import NAME, Base, Manifest, verify
from phalanx.checkpoint.places import is_remote
from phalanx.checkpoint.storage import FOLDERS, Receipt, Storage, remove_tree, write_file, write_small
from phalanx.checkpoint.tensors import Entry, check_files, write_tensors
from phalanx.checkpoint.threads import in_threads, threads_of_rank
from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.buffers import Buffers
from phalanx.layout.box import Box
from phalanx.models.model_config import ModelConfig
from phalanx.ops.optimizer.shard import MASTER
from phalanx.optim.scaler import LossScaler
from phalanx.optim.sharded import ShardedOptimizer

MAX_FILE_BYTES = 4 << 30  # of a folder of weights that a command makes
IN_WEIGHTS = "in_weights"  # in the index: names of frozen tensors, whose values are those in weights/
# in the index: the kinds of tensors that do not have all kinds, by name, because optimizers differ in state
KINDS_OF = "kinds_of"
# Of a checkpoint of a run. One thread writes each file (a kernel lets only one writer at a time into a file), so a rank
# needs more files than threads, and none so large that the others wait for it.
SAVE_FILE_BYTES = 1 << 30
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    CHAT_TEMPLATE,
    "chat_template.json",
    "preprocessor_config.json",  # of images
    "processor_config.json",
)


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint records besides its tensors; the same on every rank.

    config      the whole resolved config as JSON values; its hash goes into the manifest
    scalars     the loop's counters (JSON values; floats are restored bit-exactly)
    tokenizer   a tokenizer.json or a folder with tokenizer files, copied beside the weights
    token_ids   bos_token_id, eos_token_id, pad_token_id, as far as they exist
    parent      step of the run's previous checkpoint
    source      the Hugging Face folder from which the model comes: its generation settings and chat template are also
                copied
    adapters    adapter_config.json of a run with adapters, if PEFT has the method
    template    the chat template on which the model is trained, where it is not the tokenizer's own
    turn_end    the token that ends answers of that template: generation stops at it
    beside      contents of further small files beside the weights, by name
    separate    whether all that is trained goes to the adapters' folder: weights of the model (lora.also), too
    base        the weights that stay as they are, if they lie elsewhere: they are not written
    """

    step: int
    consumed_samples: int
    model: ModelConfig
    config: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    token_ids: dict[str, Any] = field(default_factory=dict)
    parent: int | None = None
    source: Path | None = None
    adapters: dict[str, Any] | None = None
    template: bytes | None = None
    turn_end: int | None = None
    beside: Mapping[str, bytes] = field(default_factory=dict)
    separate: bool = False
    base: Base | None = None


@dataclass(frozen=True)
class Saved:
    """The result of a save: `written` is false if a good checkpoint of that step already existed; `warnings` are about
    its upkeep.

    removed     older checkpoints that it replaced (checkpoint.keep_last)
    copy_s      seconds until this rank had a copy of everything in host memory; 0 without a copy
    write_s     seconds until every file of every rank was on disk; read_s: until each was also read back and compared
    """

    path: Path
    written: bool
    warnings: tuple[str, ...] = ()
    copy_s: float = 0.0
    write_s: float = 0.0
    read_s: float = 0.0
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """Where checkpoints go, and how.

    keep        what retention keeps; protect: further ones (the one from which the run was resumed)
    check       called on rank 0 before anything is written: CheckpointError if the root is no longer the run's
    threads     of a rank that write files at the same time; None: according to the host's cores (checkpoint.threads)
    """

    root: Path
    storage: Storage
    keep: Keep = Keep()
    protect: tuple[Path, ...] = ()
    check: Callable[[], None] = lambda: None
    threads: int | None = None


class TrainingState(Protocol):
    """What checkpoints hold of a rank's training, and what ranks use to meet; engine.build.State is one."""

    @property
    def buffers(self) -> Buffers: ...

    @property
    def optimizer(self) -> ShardedOptimizer: ...

    @property
    def scaler(self) -> LossScaler: ...

    @property
    def mesh(self) -> Mesh: ...


@dataclass(frozen=True)
class Content:
    """This rank's part of a checkpoint.

    files       weight and adapter files of all ranks
    weights     the tensors of those that this rank writes, in order; local: of files whose tensors it has whole, as
                views of the run's memory
    copied      all weights are in memory; otherwise each of `weights` is gathered when it is requested, and all ranks
                must request all of theirs
    kinds       everything stored for an element: its master, and the state of each optimizer
    state       this rank's boxes, with master and optimizer state by kind for each; kept: those of what is not trained
    file_bytes  most bytes of a state file, unless a single row of a box is larger
    frozen      names of this rank's tensors that are stored in the weights alone
    scalars     of the optimizer, the scaler and others; small, and on the device until they are copied
    needed      bytes that this rank will write; gathered: those among them that are in tensors created for the save:
                weights, and state that is packed; room: bytes of host memory for a copy of all
    """

    snapshot: Snapshot
    layout: dict[str, int]
    dtype: torch.dtype
    files: list[File]
    weights: Iterable[tuple[File, Tensor]]
    local: list[tuple[File, Tensor]]
    kinds: tuple[str, ...]
    state: list[dict[str, Item]]
    kept: list[Item]
    frozen: list[str]
    scalars: dict[str, Tensor]
    needed: int
    gathered: int
    room: int
    file_bytes: int
    copied: bool = False


def collect(
    snapshot: Snapshot,
    state: TrainingState,
    max_file_bytes: int = SAVE_FILE_BYTES,
    more: Mapping[str, Tensor] | None = None,
    files: list[File] | None = None,
) -> Content:
    """What this rank will write, as views of the run's memory; weights are gathered tensor by tensor as they are
    requested.

    more: small tensors, equal on all ranks, that go into the manifest as `float.hex`. files: from an earlier save, so
    that ranks need not agree again.
    """
    buffers, optimizer, mesh = state.buffers, state.optimizer, state.mesh
    buffers.ready()
    boxes, kept = state_to_save(optimizer.shards, mesh), kept_to_save(buffers, mesh)
    written = snapshot.base is None
    whole = whole_weights(buffers) if written else {}
    # if nothing was gathered in the earlier save, nothing is now
    shares = not files or any(file.folder != FOLDER and not file.local for file in files)
    weights = weights_to_save(buffers, mesh) if written and shares else []
    adapters = adapters_to_save(buffers, mesh, exported=snapshot.separate)
    dtype = next(f.weight.dtype for f in buffers.flat if f.bucket.trained)
    files = files or _planned(mesh, snapshot.model, weights, adapters, max_file_bytes, whole)
    mine = [file for file in files if file.writer == mesh.world.index]
    items = [*kept, *(item for box in boxes for item in box.values())]
    scalars = {
        "optimizer.step": optimizer.step,
        **{f"scaler.{k}": v for k, v in state.scaler.state().items()},
        **(more or {}),
    }
    sizes = [job.size for file in mine for job in file.jobs] + [s.numel() * s.element_size() for s in scalars.values()]
    return Content(
        snapshot=snapshot,
        layout={**dataclasses.asdict(mesh.grid), "world": mesh.world.size},
        dtype=dtype,
        files=files,
        weights=gather(mesh.world, files, weights + adapters, mesh.device),
        local=[(file, whole[job.name]) for file in mine if file.local for job in file.jobs],
        kinds=optimizer.kinds,
        state=boxes,
        kept=kept,
        frozen=frozen_names(buffers),
        scalars=scalars,
        needed=sum(file.size for file in mine) + sum(i.nbytes for i in items),
        gathered=sum(file.size for file in mine if not file.local) + sum(i.nbytes for i in items if i.packed),
        room=room([*sizes, *(i.box.numel * i.stored.dtype.itemsize for i in items)]),
        file_bytes=max_file_bytes,
    )


def _planned(
    mesh: Mesh,
    model: ModelConfig,
    weights: list[Item],
    adapters: list[Item],
    max_file_bytes: int,
    whole: Container[str],
) -> list[File]:
    """The files of weights, and the one of adapters (PEFT reads one), if there are any. whole: names of tensors that
    this rank has whole."""
    offers, beside_offers = offered(mesh.world, weights), offered(mesh.world, adapters)
    files = plan_files(offers, max_file_bytes) if any(offers) else []
    have = [n for n, file in enumerate(files) if all(job.name in whole for job in file.jobs)]
    files = written_where_whole(files, agree(mesh.world, lambda: have))
    beside = plan_files(beside_offers, 1 << 62) if any(beside_offers) else []
    named = peft_names(model)
    for file in beside:
        names = tuple(named(job.name) for job in file.jobs)
        files.append(dataclasses.replace(file, name=FILE, folder=FOLDER, names=names))
    return files


def weights_copied(content: Content, host: HostCopies) -> Content:
    """The same with gathered weights in host memory, and scalars. Called by all ranks together."""
    host.begin(content.room, content.gathered)
    found = dataclasses.replace(
        content,
        weights=[(file, host.copy_fresh(tensor)) for file, tensor in content.weights],
        scalars={name: host.copy(value) for name, value in content.scalars.items()},
    )
    host.leave_open()
    return found


def copied(content: Content, host: HostCopies) -> Content:
    """What `weights_copied` made, with the rest in host memory too; in any thread. After `host.release` the run's
    memory may change."""
    with host.last():
        return dataclasses.replace(
            content,
            local=[(file, host.copy(tensor)) for file, tensor in content.local],
            state=[
                {kind: dataclasses.replace(item, stored=host.copy(item.view)) for kind, item in box.items()}
                for box in content.state
            ],
            kept=[dataclasses.replace(item, stored=host.copy(item.view)) for item in content.kept],
            copied=True,
        )


def write(content: Content, target: Target, axis: Axis) -> Saved:
    """Write what every rank of the axis collected, and tidy up. With a copy, this may run in another thread, with an
    axis of its own."""
    final, storage = target.root / step_name(content.snapshot.step), target.storage
    folder, warnings = _begin(final, content, target, axis)
    if folder is None:
        return Saved(final, False, tuple(warnings))
    threads, began = target.threads or threads_of_rank(axis), time.monotonic()
    try:
        written = _write_files(folder, content, axis, storage, threads)
        write_s = time.monotonic() - began
        agree(axis, lambda: _read_back(folder, written[axis.index], threads))
        read_s = time.monotonic() - began - write_s
        files = {name: receipt for rank in written for name, receipt in rank.items()}
        agree(axis, lambda: _commit(folder, final, _manifest(content, files), storage) if axis.index == 0 else None)
    except CheckpointError:
        if axis.index == 0:
            with suppress(OSError):  # frees the room; what cannot be removed now is removed by the next save
                remove_tree(storage, folder)
        raise
    removed, problems = agree(axis, lambda: _tidy(target) if axis.index == 0 else None)[0]
    return Saved(final, True, (*warnings, *problems), write_s=write_s, read_s=read_s, removed=tuple(removed))


def _tidy(target: Target) -> tuple[list[str], list[str]]:
    """Remove what the new checkpoint replaces; returns what was removed, and what failed."""
    left = remove_leftovers(target.root, target.storage)
    removed, problems = retain(target.root, target.keep, target.storage, target.protect)
    return removed, left + problems


def _begin(final: Path, content: Content, target: Target, axis: Axis) -> tuple[Path | None, list[str]]:
    """Create the temporary folder (None if a good checkpoint of this step already exists); also returns what could not
    be tidied up before."""
    needed = sum(agree(axis, lambda: content.needed))
    folders = tuple(dict.fromkeys((*FOLDERS, *(file.folder for file in content.files))))
    name, warnings = agree(axis, lambda: _make_folder(final, needed, target, folders) if axis.index == 0 else None)[0]
    if name is None:
        return None, warnings
    folder = final.with_name(name)

    def look() -> None:
        if not is_remote(folder) and not (folder / "weights").is_dir():
            raise CheckpointError(
                f"{folder}, which rank 0 made, is not there: checkpoints need a folder that all nodes share"
            )

    agree(axis, look)
    return folder, warnings


def _put_aside(final: Path, storage: Storage) -> str:
    """Rename a checkpoint of another step, or a link, that has the name of the one to be written; CheckpointError where
    nothing can be renamed."""
    aside = final.with_name(f"{final.name}.holds-{step_name(held_step(final) or 0)}")
    try:
        storage.rename(final, aside)
    except OSError as error:
        raise CheckpointError(
            f"{final} holds step {held_step(final)}: move it away, so that step {step_of(final)} can be saved ({error})"
        ) from error
    return f"{final} held another step: it is {aside.name} now"


def _make_folder(final: Path, needed: int, target: Target, folders: tuple[str, ...]) -> tuple[str | None, list[str]]:
    target.check()
    storage = target.storage
    warnings = remove_leftovers(final.parent, storage)
    if final.exists() and held_step(final) not in (None, step_of(final)):
        warnings.append(_put_aside(final, storage))
    elif final.exists() and not verify(final):
        return None, warnings  # committed folders are never written to
    folder = storage.begin(final, folders)
    free = storage.free(folder)
    if free is not None and free < needed:
        remove_tree(storage, folder)
        raise CheckpointError(f"not enough room for the checkpoint {final}: it needs {needed} bytes, {free} are free")
    return folder.name, warnings


Receipts = dict[str, Receipt]  # of files, by their names in the checkpoint


@dataclass(frozen=True)
class NewFile:
    """A file of tensors that this rank writes. boxes, kept: the boxes of the state in it (all kinds of each), for the
    index."""

    name: str
    entries: list[Entry]
    tensors: Iterable[Tensor]
    boxes: list[Item] = field(default_factory=list)
    kept: list[Item] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(prod(shape) * dtype.itemsize for _, shape, dtype in self.entries)


def _write_files(folder: Path, content: Content, axis: Axis, storage: Storage, threads: int) -> list[Receipts]:
    """Write all files but the manifest; returns their receipts by rank. Weights that are still to be gathered come
    before the rest, one after another."""
    state, receipts, failed = _state_files(content, axis.index), Receipts(), list[CheckpointError]()
    for file in () if content.copied else _weight_files(content, content.weights):
        try:
            receipts[file.name] = write_tensors(storage, folder / file.name, file.entries, file.tensors)
        except CheckpointError as error:
            failed.append(error)  # the other ranks continue to send

    def worker(files: Iterator[NewFile]) -> None:
        for file in files:
            receipts[file.name] = write_tensors(storage, folder / file.name, file.entries, file.tensors)

    def rest() -> dict[str, Any]:
        for error in failed:
            raise error
        weights = [*content.local, *(content.weights if content.copied else ())]
        here = [dataclasses.replace(file, tensors=list(file.tensors)) for file in _weight_files(content, weights)]
        files = [*here, *state]
        # the largest first, so that no thread is left with a large one at the end
        in_threads(sorted(files, key=lambda f: -f.size), worker, threads)
        if axis.index == 0:
            receipts.update(_write_beside_weights(folder, content, storage))
        tables = {what: {f.name: [_place(i) for i in getattr(f, what)] for f in state} for what in ("boxes", "kept")}
        of_names = {box[MASTER].name: [*box] for box in content.state if tuple(box) != content.kinds}
        found = {name: dataclasses.asdict(r) for name, r in receipts.items()}
        return {"receipts": found, **tables, KINDS_OF: of_names, IN_WEIGHTS: content.frozen}

    answers = agree(axis, rest)
    found = [{name: Receipt(**r) for name, r in answer["receipts"].items()} for answer in answers]
    index = agree(
        axis,
        lambda: dataclasses.asdict(_write_index(folder, content.kinds, answers, storage)) if axis.index == 0 else None,
    )[0]
    found[0]["state/index.json"] = Receipt(**index)
    return found


def _weight_files(content: Content, weights: Iterable[tuple[File, Tensor]]) -> Iterator[NewFile]:
    """The files of these weights and adapters. The tensors of each must be taken before the next is requested."""
    for (folder, name), group in groupby(weights, lambda pair: (pair[0].folder, pair[0].name)):
        file = next(f for f in content.files if (f.folder, f.name) == (folder, name))
        tensors = (tensor for _, tensor in group)
        names = file.names or tuple(job.name for job in file.jobs)
        entries = [(name, job.shape, job.dtype) for name, job in zip(names, file.jobs, strict=True)]
        yield NewFile(f"{folder}/{name}", entries, tensors)


def _state_files(content: Content, rank: int) -> list[NewFile]:
    """Masters, the optimizer's state, and what is not trained, in separate files of this rank, with all kinds of a box
    in the same file. A box that is larger than a file (an embedding's) is cut by rows."""
    state = [part for box in content.state for part in _cut(box, content.file_bytes)]
    kept = [part for item in content.kept for part in _cut({MASTER: item}, content.file_bytes)]
    files, size = list[list[tuple[str, Item]]](), 0
    for box in ([*part.items()] for part in (*state, *kept)):
        more = sum(item.nbytes for _, item in box)
        if not files or size + more > content.file_bytes:
            files.append([])
            size = 0
        files[-1] += box
        size += more
    kept_ids = {id(part[MASTER]) for part in kept}
    return [
        _state_file(f"state/rank-{rank:05d}" + (f"-{n:05d}" if n else ""), items, content.kinds, kept_ids)
        for n, items in enumerate(files)
    ]


def _cut(box: dict[str, Item], most: int) -> Iterator[dict[str, Item]]:
    """The box in parts of whole rows, each at most `most` bytes in all kinds together, or one row."""
    shape, size = box[MASTER].box.shape, sum(item.nbytes for item in box.values())
    if size <= most or not shape:
        yield box
        return
    step = max(1, shape[0] * most // size)
    for first in range(0, shape[0], step):
        yield {kind: item.rows(first, min(first + step, shape[0])) for kind, item in box.items()}


def _state_file(name: str, items: list[tuple[str, Item]], kinds: Sequence[str], kept_ids: set[int]) -> NewFile:
    items = sorted(items, key=lambda pair: kinds.index(pair[0]))
    entries = [(key_of(kind, i.name, i.box), i.box.shape, i.dtype) for kind, i in items]
    masters = [i for kind, i in items if kind == MASTER]
    return NewFile(
        f"{name}.safetensors",
        entries,
        (i.view for _, i in items),  # what is packed is unpacked when its turn comes
        [i for i in masters if id(i) not in kept_ids],
        [i for i in masters if id(i) in kept_ids],
    )


def _write_beside_weights(folder: Path, content: Content, storage: Storage) -> Receipts:
    """Write what turns the weights into a Hugging Face folder: configs, the index of a sharded model, tokenizer; and
    the adapters into one of PEFT."""
    snapshot, dtype = content.snapshot, content.dtype
    files = [file for file in content.files if file.folder == "weights"]
    texts: dict[str, bytes] = {
        "generation_config.json": _json(generation_config(snapshot.token_ids, snapshot.model.decoder_start)),
        **source_files(snapshot.source),
        **tokenizer_files(snapshot.tokenizer),
        **({} if snapshot.template is None else {CHAT_TEMPLATE: snapshot.template}),
        **snapshot.beside,
    }
    if snapshot.turn_end is not None:
        texts["generation_config.json"] = ending_with(snapshot.turn_end, texts["generation_config.json"])
    # the source's own config.json has another dtype
    texts["config.json"] = _json(to_hf(snapshot.model, dtype, snapshot.token_ids))
    if len(files) > 1:
        where = {job.name: f.name for f in files for job in f.jobs}
        size = sum(f.size for f in files)
        texts[INDEX] = _json({"metadata": {"total_size": size}, "weight_map": where})
    written = write_small(storage, folder / "weights", texts)
    receipts = {f"weights/{name}": receipt for name, receipt in written.items()}
    if snapshot.adapters is not None:
        name = f"{FOLDER}/{CONFIG}"
        receipts[name] = write_file(storage, folder / name, [_json(snapshot.adapters)])
    return receipts


def ending_with(token: int, text: bytes) -> bytes:
    """A generation_config.json whose generation also ends with a token; one that says so already stays as it is."""
    stated = json.loads(text)
    known = stated.get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if token in ends:
        return text
    stated.pop("_from_model_config", None)  # transformers would go back to config.json's one token
    return _json({**stated, "eos_token_id": [token, *ends] if ends else token})


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def source_files(folder: Path | None) -> dict[str, bytes]:
    """Contents of the small files of a Hugging Face folder by name: configs, and everything that belongs to its
    tokenizer."""
    names = () if folder is None else ("config.json", "generation_config.json", *TOKENIZER_FILES)
    return {name: (folder / name).read_bytes() for name in names if folder is not None and (folder / name).is_file()}


def tokenizer_files(path: str | None) -> dict[str, bytes]:
    """Contents of the tokenizer's files by name. A lone tokenizer.json is given the config that `AutoTokenizer`
    requires."""
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


def _write_index(folder: Path, kinds: Sequence[str], answers: list[dict[str, Any]], storage: Storage) -> Receipt:
    """Write which boxes of which tensors are in which file of the state."""
    tables = {
        table: {file: found for a in answers for file, found in a[what].items()}
        for table, what in (("files", "boxes"), ("kept", "kept"))
    }
    of_names = {name: has for a in answers for name, has in a[KINDS_OF].items()}
    frozen = sorted({name for a in answers for name in a[IN_WEIGHTS]})
    return write_file(storage, folder / "state/index.json", [state_index_text(kinds, tables, of_names, frozen)])


def state_index_text(
    kinds: Sequence[str], tables: dict[str, Any], of_names: dict[str, list[str]], frozen: Sequence[str]
) -> bytes:
    """The index of the state: kinds of all of it and of single tensors, tables of boxes by file, and what is in
    weights/ alone."""
    index = {"kinds": kinds, **tables, **({KINDS_OF: of_names} if of_names else {})}
    index |= {IN_WEIGHTS: frozen} if frozen else {}
    return json.dumps(index, separators=(",", ":")).encode()


def _place(item: Item) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return item.name, item.shape, item.box.start, item.box.stop


def _read_back(folder: Path, receipts: Receipts, threads: int) -> None:
    """Check that what a rank wrote is what it meant to write. In object storage only sizes are checked, because its
    client sends checksums along."""
    try:
        for name, receipt in receipts.items():
            if (size := (folder / name).stat().st_size) != receipt.size:
                raise DamagedCheckpoint(f"{folder / name} has {size} bytes instead of {receipt.size}")
        if not is_remote(folder):
            check_files({folder / name: receipt for name, receipt in receipts.items()}, threads)
    except DamagedCheckpoint as error:
        raise CheckpointError(
            f"{folder} does not read back as it was written: the disk or the memory is bad ({error})"
        ) from error


def _manifest(content: Content, files: dict[str, Receipt]) -> Manifest:
    snapshot = content.snapshot
    return Manifest(
        step=snapshot.step,
        consumed_samples=snapshot.consumed_samples,
        parent=snapshot.parent,
        model=dataclasses.asdict(snapshot.model),
        config=snapshot.config,
        layout=content.layout,
        scalars=snapshot.scalars,
        optimizer={name: hex_of(value) for name, value in content.scalars.items()},
        files=dict(sorted(files.items())),
        base=snapshot.base,
    )


def hex_of(values: Tensor) -> str:
    """Numbers in a form that restores them exactly."""
    return " ".join(float(x).hex() for x in values.flatten().tolist())


def _commit(folder: Path, final: Path, manifest: Manifest, storage: Storage) -> None:
    write_file(storage, folder / NAME, [manifest.text().encode()])
    storage.commit(folder, final)
