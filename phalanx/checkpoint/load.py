"""Load a checkpoint, or a Hugging Face folder, into any layout: every rank reads just the boxes that it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.adapters import FOLDER, adapter_folder, check_wanted
from phalanx.checkpoint.agree import agree, together
from phalanx.checkpoint.boxes import Item, adapters_to_load, kept_to_load, masters_to_load, state_to_load
from phalanx.checkpoint.hf import differences
from phalanx.checkpoint.hf_files import HEAD, Shapes, adapt, folder_of, hf_index, predictors_in, same_in, stored_in
from phalanx.checkpoint.manifest import NAME, Manifest, read_checked, read_manifest
from phalanx.checkpoint.names import folded
from phalanx.checkpoint.places import place
from phalanx.checkpoint.save import IN_WEIGHTS, KINDS_OF, TrainingState, key_of
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import Index, Stored, StoredBox, check_files, fill
from phalanx.checkpoint.threads import threads_of_rank
from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.buffers import Buffers
from phalanx.layout.box import Box
from phalanx.models.model_config import ModelConfig
from phalanx.ops.optimizer.shard import MASTER
from phalanx.optim.sharded import ShardedOptimizer

SHOWN = 200  # lines of tensor problems in one error; names that differ only in numbers share a line


def load_state(
    path: str | Path,
    state: TrainingState,
    model: ModelConfig | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Masters, the optimizer's state and step, and the loss scale, bit for bit as saved in any layout; then weights =
    masters, cast.

    Returns the loop's scalars with `step` and `consumed_samples`. Called by all ranks. CheckpointError on all of them
    if the checkpoint is missing or is of another model (given `model`, every differing field is listed, old -> new);
    DamagedCheckpoint if a byte that a rank reads is not what was saved. more: small tensors that were saved along;
    those of one owner (the part of the name before the dot) become zero if any of them does not fit.
    """
    path, buffers, optimizer, mesh = place(path), state.buffers, state.optimizer, state.mesh
    manifest = together(mesh.world, lambda: read_manifest_for(path, model))
    values = [{kind: shard.values(kind) for kind in shard.kinds} for shard in optimizer.shards]
    items, kept = state_to_load(optimizer.shards, values), kept_to_load(buffers)
    masters = [*items.pop(MASTER), *kept]
    wanted = wanted_names(mesh, masters)
    needed = {i.name: s.kinds for s in optimizer.shards for slot in s.bucket.slots for i in slot.spec.pieces}
    moving, index, frozen = together(mesh.world, lambda: _state_index(path, manifest, wanted, optimizer, needed))
    for x in (x for of_shard in values for x in of_shard.values()):
        x.zero_()  # padding is zero, whatever the memory held
    for flat in (f for f in buffers.flat if not f.bucket.learns):
        flat.master.zero_()
    # tensors that were frozen start with a state of zero
    had = {kind: [i for i in of_kind if i.name in moving] for kind, of_kind in items.items()}
    threads = threads_of_rank(mesh.world)
    stored, weights = {MASTER: [i for i in masters if i.name not in frozen], **had}, path / "weights"
    exported = [(i, frozen[i.name]) for i in masters if i.name in frozen]
    agree(mesh.world, lambda: _fill_state(stored, index, path / "state", manifest.receipts("state"), threads))
    agree(mesh.world, lambda: fill(exported, weights, manifest.receipts("weights"), threads))
    for shard, of_shard in zip(optimizer.shards, values):
        for kind, x in of_shard.items():
            shard.keep(kind, x)
    numbers = {name: [float.fromhex(x) for x in text.split()] for name, text in manifest.optimizer.items()}
    optimizer.step.fill_(numbers["optimizer.step"][0])
    for name, value in state.scaler.state().items():
        value.fill_(numbers[f"scaler.{name}"][0])
    unfit = {
        name.partition(".")[0] for name, value in (more or {}).items() if len(numbers.get(name, [])) != value.numel()
    }
    for name, value in (more or {}).items():
        saved = torch.tensor(
            numbers[name] if name.partition(".")[0] not in unfit else [0.0] * value.numel(), dtype=torch.float64
        )
        value.copy_(saved.view(value.shape))
    agree(mesh.world, lambda: check_weights(path, manifest, mesh.world.index, mesh.world.size, threads))
    _publish(buffers)
    return {**manifest.scalars, "step": manifest.step, "consumed_samples": manifest.consumed_samples}


def _state_index(
    path: Path, manifest: Manifest, wanted: Shapes, optimizer: ShardedOptimizer, needed: dict[str, tuple[str, ...]]
) -> tuple[frozenset[str], Index, Index]:
    """Names of the tensors that have optimizer state, where each box of all tensors in the state is stored, and where
    those are that `weights/` alone has. `needed`: the kinds that this rank's tensors require."""
    check_kinds(path, manifest, optimizer)
    moving, kept = state_index(path, manifest), state_index(path, manifest, "kept")
    check_kinds_of(path, manifest, {name: kinds for name, kinds in needed.items() if name in moving})
    frozen = frozen_index(path, manifest)
    return frozenset(moving), fitting({**moving, **kept, **frozen}, wanted, str(path)), frozen


def frozen_index(path: Path, manifest: Manifest) -> Index:
    """Where tensors lie that were frozen, whose values are those of `weights/`."""
    names = _index_of(path, manifest, lambda index: [str(name) for name in index.get(IN_WEIGHTS, [])])
    if not names:
        return {}
    index = hf_index(path / "weights", manifest.receipts("weights"))
    lost = [name for name in names if name not in index]
    if lost:
        raise DamagedCheckpoint(f"{path / 'weights'} does not hold {lost[0]}")
    return {name: index[name] for name in names}


def read_manifest_for(path: Path, model: ModelConfig | None) -> Manifest:
    """The manifest of a checkpoint of this model (if given)."""
    manifest = read_manifest(path)
    changed = differences(manifest.model, json.loads(json.dumps(asdict(model)))) if model is not None else []
    if changed:
        raise CheckpointError(f"checkpoint {path} is of another model: " + ", ".join(changed))
    return manifest


def wanted_names(mesh: Mesh, items: list[Item]) -> Shapes:
    """Names and shapes of the whole model's tensors: those of which any rank holds a part."""
    return {
        name: tuple(shape)
        for rank in agree(mesh.world, lambda: {i.name: i.shape for i in items})
        for name, shape in rank.items()
    }


def fitting(index: Index, wanted: Shapes, where: str) -> Index:
    """The index, if it holds exactly the wanted tensors in their shapes. Otherwise CheckpointError with every
    difference."""
    problems = folded(mismatches(index, wanted))
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise CheckpointError(
            f"{where} does not fit the model:\n" + "\n".join(problems[:SHOWN] + more + _depths(index, wanted))
        )
    return index


def _depths(index: Index, wanted: Shapes) -> list[str]:
    """What to set if the model has more or fewer multi-token prediction modules than the folder."""
    have, want = predictors_in(index), predictors_in(wanted)
    return (
        [f"it has {len(have)} multi-token prediction modules: set model.num_nextn_predict_layers={len(have)}"]
        if have != want
        else []
    )


def check_weights(path: Path, manifest: Manifest, part: int, parts: int, threads: int) -> None:
    """Check this part of the files that a resume does not read (weights/, adapter/), so that damage in a checkpoint
    does not stay undetected."""
    unread = [name for name in manifest.files if name.startswith(("weights/", f"{FOLDER}/"))]
    check_files({path / name: manifest.files[name] for name in unread[part::parts]}, threads)


def check_kinds(path: Path, manifest: Manifest, optimizer: ShardedOptimizer) -> None:
    """CheckpointError if the checkpoint is of an optimizer with other state."""
    saved = state_kinds(path, manifest)
    if set(saved) != set(optimizer.kinds):
        was = manifest.config.get("optim", {}).get("name", "another optimizer")
        state = [", ".join(kind for kind in kinds if kind != MASTER) or "nothing" for kinds in (saved, optimizer.kinds)]
        raise CheckpointError(
            f"checkpoint {path} is of {was}, whose state is {state[0]}; {optimizer.config.name} needs {state[1]}. Its "
            f"weights can be trained on from step 0: init_from={path / 'weights'}, in another dir"
        )


def check_kinds_of(path: Path, manifest: Manifest, needed: dict[str, tuple[str, ...]]) -> None:
    """CheckpointError if tensors have the state of another optimizer than the one that updates them now."""
    every, of_names = state_kinds(path, manifest), kinds_of_names(path, manifest)
    found = {name: of_names.get(name, every) for name in needed}
    wrong = [
        f"{name}: it has {', '.join(found[name])}, its optimizer needs {', '.join(kinds)}"
        for name, kinds in needed.items()
        if set(found[name]) != set(kinds)
    ]
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise CheckpointError(
            f"checkpoint {path} is of a run in which other parameters went to optim.fallback:\n"
            + "\n".join(folded(wrong)[:SHOWN] + more)
        )


def kinds_of_names(path: Path, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """The kinds of state of tensors that do not have all kinds, by name."""
    return _index_of(path, manifest, lambda index: {n: tuple(has) for n, has in index.get(KINDS_OF, {}).items()})


def state_kinds(path: Path, manifest: Manifest) -> tuple[str, ...]:
    """The kinds stored for each element: its master, and the optimizer's state by name."""
    return tuple(_index_of(path, manifest, lambda index: [str(kind) for kind in index["kinds"]]))


def _index_of(path: Path, manifest: Manifest, read: Callable[[Any], Any]) -> Any:
    text = read_checked(path / "state/index.json", manifest.files.get("state/index.json"))
    try:
        return read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path / 'state/index.json'} is damaged: {error}") from error


def state_index(path: Path, manifest: Manifest, table: Literal["files", "kept"] = "files") -> Index:
    """Where each box of the state is stored (kept: of what is not trained); `key` still lacks the kind."""

    def read(tables: Any) -> Index:
        index: Index = {}
        for file, boxes in tables[table].items():
            for name, shape, start, stop in boxes:
                stored = index.setdefault(name, Stored(tuple(shape)))
                stored.parts.append(StoredBox(Path(file).name, "", Box(tuple(start), tuple(stop))))
        return index

    return _index_of(path, manifest, read)


def mismatches(index: Index, wanted: Shapes) -> list[str]:
    """Every tensor that is missing, has another shape, or is left over; a vocabulary of another size is mentioned."""
    found = [f"missing: {name} {shape}" for name, shape in wanted.items() if name not in index]
    found += [f"not in the model: {name} {stored.shape}" for name, stored in index.items() if name not in wanted]
    for name, shape in wanted.items():
        have = index[name].shape if name in index else shape
        if have != shape:
            size = (
                f" (vocabulary of {have[0]} instead of {shape[0]})"
                if _is_vocabulary(name) and have[1:] == shape[1:]
                else ""
            )
            found.append(f"another shape: {name} has {have}, the model wants {shape}{size}")
    return found


def _is_vocabulary(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "wte.weight", HEAD))


def _fill_state(
    wanted: dict[str, list[Item]], index: Index, folder: Path, receipts: dict[str, Receipt], threads: int
) -> None:
    """Fill all kinds together: all kinds of a box are in the same file."""
    pairs = list[tuple[Item, Stored]]()
    for kind, items in wanted.items():
        keyed = {
            name: Stored(s.shape, [replace(p, key=key_of(kind, name, p.box)) for p in s.parts])
            for name, s in index.items()
        }
        pairs += [(item, keyed[item.name]) for item in items]
    fill(pairs, folder, receipts, threads)


def load_weights(path: str | Path, buffers: Buffers, mesh: Mesh) -> bool:
    """Masters and weights from a Hugging Face safetensors folder (or the `weights/` of one of our checkpoints), in any
    dtype, MXFP4, or FP8 with block scales, in one file or several with an index.

    CheckpointError on all ranks names every tensor that is missing, unexpected or of another shape: nothing is ever
    left at random values. The optimizer's state is not touched. Tensors of our checkpoints are compared with their
    checksums; a third-party folder has none.

    Adapters saved with these weights are loaded too; returns whether there were any. CheckpointError if there are, and
    the model has none.
    """
    folder = folder_of(path)
    beside, adapters = together(mesh.world, lambda: adapter_folder(folder)), adapters_to_load(buffers)
    wanted_adapters = wanted_names(mesh, adapters)
    together(mesh.world, lambda: check_wanted(folder, beside, wanted_adapters))
    items = masters_to_load(buffers)
    wanted = wanted_names(mesh, items)
    receipts = together(mesh.world, lambda: weight_receipts(folder))
    index = together(mesh.world, lambda: _weights_index(folder, wanted, receipts))
    for f in buffers.flat:
        f.master.zero_()
    threads = threads_of_rank(mesh.world)
    agree(mesh.world, lambda: fill([(item, index[item.name]) for item in items], folder, receipts, threads))
    if beside is not None:
        known = together(mesh.world, lambda: fitting(beside.index, wanted_adapters, str(beside.path)))
        pairs = [(item, known[item.name]) for item in adapters]
        agree(mesh.world, lambda: fill(pairs, beside.path, beside.receipts, threads))
    _publish(buffers)
    return beside is not None


def _weights_index(folder: Path, wanted: Shapes, receipts: dict[str, Receipt] | None) -> Index:
    index = adapt(stored_in(folder, receipts), wanted, str(folder), same_in(folder, receipts))
    return fitting(index, wanted, str(folder))


def weight_receipts(folder: Path) -> dict[str, Receipt] | None:
    """Receipts of the weights folder of one of our checkpoints, whose small files are compared right away; None: a
    third-party folder."""
    if folder.name != "weights" or not (folder.parent / NAME).is_file():
        return None
    receipts = read_manifest(folder.parent).receipts("weights")
    for name, receipt in receipts.items():
        if not receipt.parts:
            read_checked(folder / name, receipt)
    return receipts


@torch.no_grad()
def _publish(buffers: Buffers) -> None:
    buffers.publish()
    buffers.ready()
