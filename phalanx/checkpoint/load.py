"""Load a checkpoint, or a Hugging Face folder, into any layout: every rank reads just the boxes that it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.adapters import FOLDER, adapter_folder, check_wanted
from phalanx.checkpoint.agree import agree, together
from phalanx.checkpoint.base import WeightsAt, agree_on, base_at, base_index, check_base
from phalanx.checkpoint.boxes import Held, Item, adapters_to_load, kept_to_load, masters_to_load, state_to_load
from phalanx.checkpoint.encode import check_base_there, encode_from, encoded_shapes
from phalanx.checkpoint.hf import differences
from phalanx.checkpoint.hf_files import Shapes, folder_of, hf_index, predictors_in, tensors_of
from phalanx.checkpoint.manifest import Manifest, read_checked, read_manifest
from phalanx.checkpoint.names import folded
from phalanx.checkpoint.places import place
from phalanx.checkpoint.save import IN_WEIGHTS, KINDS_OF, TrainingState, key_of
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import Index, Stored, StoredBox, TensorFolder, check_files, fill
from phalanx.checkpoint.threads import threads_of_rank
from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.buffers import Buffers
from phalanx.data_parallel.flat import FlatBucket
from phalanx.data_parallel.homes import MatrixHome
from phalanx.layout.box import Box
from phalanx.models.model_config import ModelConfig
from phalanx.models.registry import families
from phalanx.ops.optimizer.packed import PackedTensor
from phalanx.ops.optimizer.shard import MASTER, Shard
from phalanx.optim.sharded import ShardedOptimizer

SHOWN = 200  # lines of tensor problems in one error; names that differ only in numbers share a line


def load_state(
    path: str | Path,
    state: TrainingState,
    model: ModelConfig | None = None,
    more: Mapping[str, Tensor] | None = None,
    base: str | None = None,
) -> dict[str, Any]:
    """Masters, the optimizer's state and step, and the loss scale, bit for bit as saved in any layout; then weights =
    masters, cast.

    Returns the loop's scalars with `step` and `consumed_samples`. Called by all ranks. CheckpointError on all of them
    if the checkpoint is missing or is of another model (given `model`, every differing field is listed, old -> new);
    DamagedCheckpoint if a byte that a rank reads is not what was saved. more: small tensors that were saved along;
    those of one owner (the part of the name before the dot) become zero if any of them does not fit. base: where the
    base of adapters is, if not where it was when they were saved.
    """
    path, buffers, optimizer, mesh = place(path), state.buffers, state.optimizer, state.mesh
    manifest = together(mesh.world, lambda: read_manifest_for(path, model))
    stored = [{kind: shard.stored(kind) for kind in shard.kinds} for shard in optimizer.shards]
    kept = kept_to_load(buffers)
    wanted = wanted_names(mesh, [*state_to_load(optimizer.shards, stored)[MASTER], *kept])
    needed = {i.name: s.kinds for s in optimizer.shards for slot in s.bucket.slots for i in slot.spec.pieces}
    at = together(mesh.world, lambda: frozen_at(path, manifest, base))
    check_base(at, mesh.world)
    anew = optimizer.config.restart and not all(agree(mesh.world, lambda: kinds_fit(path, manifest, optimizer, needed)))
    checked = None if anew else needed
    moving, index, frozen = together(mesh.world, lambda: _state_index(path, manifest, wanted, optimizer, checked, at))
    for flat in (f for f in buffers.flat if not f.bucket.learns):
        flat.master.zero_()  # type: ignore[union-attr]  # padding is zero, whatever the memory held
    source = StateSource(path, manifest, index, frozen, moving, threads_of_rank(mesh.world))

    def fill_shards() -> None:
        source.fill([s for s in optimizer.shards if not s.packed], kept)
        for shard in (s for s in optimizer.shards if s.packed):
            source.fill([shard], [])

    agree(mesh.world, fill_shards)
    numbers = {name: [float.fromhex(x) for x in text.split()] for name, text in manifest.optimizer.items()}
    optimizer.step.fill_(0.0 if anew else numbers["optimizer.step"][0])
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
    agree(mesh.world, lambda: check_weights(path, manifest, mesh.world.index, mesh.world.size, source.threads))
    _publish(buffers)
    return {**manifest.scalars, "step": manifest.step, "consumed_samples": manifest.consumed_samples}


def _state_index(
    path: Path,
    manifest: Manifest,
    wanted: Shapes,
    optimizer: ShardedOptimizer,
    needed: dict[str, tuple[str, ...]] | None,
    at: WeightsAt,
) -> tuple[frozenset[str], Index, list[TensorFolder]]:
    """Names of the tensors whose optimizer state is read, where each box of all tensors in the state is stored, and
    where frozen ones are, of which the weights are `at` a place. `needed`: the kinds that this rank's tensors require;
    None: no optimizer state is read."""
    moving, kept = state_index(path, manifest), state_index(path, manifest, "kept")
    if needed is not None:
        check_kinds(path, manifest, optimizer)
        check_kinds_of(path, manifest, {name: kinds for name, kinds in needed.items() if name in moving})
    frozen = frozen_tensors(path, manifest, at, wanted)
    indices = (moving, kept, *(folder.index for folder in frozen))
    whole = {name: stored for index in indices for name, stored in index.items()}
    return frozenset(moving if needed is not None else ()), fitting(whole, wanted, str(path)), frozen


def frozen_at(path: Path, manifest: Manifest, moved: str | None = None) -> WeightsAt:
    """Where the values of a checkpoint's frozen tensors lie. moved: as of `base_at`."""
    if manifest.base is not None:
        return base_at(path, manifest.base, moved)
    return WeightsAt(path / "weights", manifest.receipts("weights"))


def frozen_tensors(path: Path, manifest: Manifest, at: WeightsAt, wanted: Shapes) -> list[TensorFolder]:
    """Where tensors lie that were frozen: those of adapters in their folder, weights `at` a place. wanted: the model's
    tensors."""
    names = frozen_names_of(path, manifest)
    if not names:
        return []
    beside = adapter_folder(path / "weights")
    small = {} if beside is None else {name: beside.index[name] for name in names if name in beside.index}
    index = hf_index(at.folder, at.receipts) if at.base is None else base_index(at, wanted)
    lost = [name for name in names if name not in index and name not in small]
    if lost:
        raise DamagedCheckpoint(f"{at.folder} does not hold {lost[0]}")
    weights = {name: index[name] for name in names if name not in small}
    found = [TensorFolder(at.folder, weights, at.receipts)]
    return found if beside is None else [*found, TensorFolder(beside.path, small, beside.receipts)]


def frozen_names_of(path: Path, manifest: Manifest) -> list[str]:
    """Names of tensors that were frozen, whose values are those of the weights."""
    return _index_of(path, manifest, lambda index: [str(name) for name in index.get(IN_WEIGHTS, [])])


def read_manifest_for(path: Path, model: ModelConfig | None) -> Manifest:
    """The manifest of a checkpoint of this model (if given)."""
    manifest = read_manifest(path)
    changed = differences(manifest.model, json.loads(json.dumps(asdict(model)))) if model is not None else []
    if changed:
        raise CheckpointError(f"checkpoint {path} is of another model: " + ", ".join(changed))
    return manifest


def wanted_names(mesh: Mesh, items: list[Item], more: Mapping[str, tuple[int, ...]] = MappingProxyType({})) -> Shapes:
    """Names and shapes of the whole model's tensors: those of which any rank holds a part. more: of other tensors."""
    return {
        name: tuple(shape)
        for rank in agree(mesh.world, lambda: {**{i.name: i.shape for i in items}, **more})
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
        was = " with ".join(optimizers_saved(manifest)) or "another optimizer"
        now = " with ".join(optimizers_in(optimizer))
        state = [", ".join(kind for kind in kinds if kind != MASTER) or "nothing" for kinds in (saved, optimizer.kinds)]
        raise CheckpointError(
            f"checkpoint {path} is of {was}, whose state is {state[0]}; {now} needs {state[1]}. Its "
            f"weights can be trained on from step 0: init_from={path / 'weights'}, in another dir; or from this step, "
            "with a state that begins at zero: optim.restart=true"
        )


def kinds_fit(path: Path, manifest: Manifest, optimizer: ShardedOptimizer, needed: dict[str, tuple[str, ...]]) -> bool:
    """Whether the state of all tensors on this rank is that of the optimizer that updates them now. Names of kinds do
    not suffice: Lion's momentum is not Muon's."""
    every, of_names = state_kinds(path, manifest), kinds_of_names(path, manifest)
    if set(every) != set(optimizer.kinds) or optimizers_saved(manifest) not in ([], optimizers_in(optimizer)):
        return False
    moving = state_index(path, manifest)
    return all(set(of_names.get(name, every)) == set(kinds) for name, kinds in needed.items() if name in moving)


def optimizers_saved(manifest: Manifest) -> list[str]:
    """The names of the optimizer of a checkpoint's run and of its fallback, if it had one; empty if not recorded."""
    optim = manifest.config.get("optim") or {}
    return [str(config["name"]) for config in (optim, optim.get("fallback")) if config and "name" in config]


def optimizers_in(optimizer: ShardedOptimizer) -> list[str]:
    """The same of an optimizer."""
    return [config.name for config in (optimizer.config, optimizer.config.fallback) if config is not None]


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
            f"checkpoint {path} is of a run in which other parameters went to optim.fallback (optim.restart=true: "
            "begin with a state of zero):\n" + "\n".join(folded(wrong)[:SHOWN] + more)
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
    kinds = [family.tensors for family in families().values()]
    return any(name in (one.embedding, one.head) for one in kinds)


@dataclass(frozen=True)
class StateSource:
    """The checkpoint of a state. index: where each box of its tensors is stored; frozen: where those are that are not
    in the state; moving: names of the tensors that have optimizer state."""

    path: Path
    manifest: Manifest
    index: Index
    frozen: Sequence[TensorFolder]
    moving: frozenset[str]
    threads: int

    def fill(self, shards: Sequence[Shard], kept: Sequence[Item]) -> None:
        """Load everything that shards hold, and `kept`. What is packed needs memory for its numbers until the end."""
        with ExitStack() as until_filled:
            values = [{k: until_filled.enter_context(staged(s.stored(k))) for k in s.kinds} for s in shards]
            items = state_to_load(shards, values)
            masters = [*items.pop(MASTER), *kept]
            # tensors that were frozen start with a state of zero
            stored = {kind: [i for i in of_kind if i.name in self.moving] for kind, of_kind in items.items()}
            elsewhere = {name for folder in self.frozen for name in folder.index}
            stored = {MASTER: [i for i in masters if i.name not in elsewhere], **stored}
            self._fill(stored)
            for folder in self.frozen:
                found = [(i, folder.index[i.name]) for i in masters if i.name in folder.index]
                fill(found, folder.folder, folder.receipts, self.threads)

    def _fill(self, wanted: Mapping[str, Sequence[Item]]) -> None:
        """All kinds together: all kinds of a box are in the same file."""
        pairs = list[tuple[Item, Stored]]()
        for kind, items in wanted.items():
            found = {name: self.index[name] for name in {i.name for i in items}}
            keyed = {
                name: Stored(s.shape, [replace(p, key=key_of(kind, name, p.box)) for p in s.parts])
                for name, s in found.items()
            }
            pairs += [(item, keyed[item.name]) for item in items]
        fill(pairs, self.path / "state", self.manifest.receipts("state"), self.threads)


@contextmanager
def staged(kept: Tensor | PackedTensor, clear: bool = True) -> Iterator[Tensor]:
    """(n,) to be filled inside: the tensor itself, or numbers that are packed at the end. clear: they begin as zeros,
    which padding stays; otherwise as they are."""
    if isinstance(kept, PackedTensor):
        numbers = torch.zeros(len(kept), dtype=kept.dtype, device=kept.device) if clear else kept.wide(kept.dtype)
        yield numbers
        kept.store_(numbers)
    else:
        yield kept.zero_() if clear else kept


HeadWanted = Literal["the folder's", "new", "none"]


@dataclass(frozen=True)
class LoadedWeights:
    """adapters: whether the folder had any. new: names of tensors of a head that it lacks, which are zero now."""

    adapters: bool
    new: frozenset[str]


def load_weights(
    path: str | Path, buffers: Buffers, mesh: Mesh, head: HeadWanted = "the folder's", encodes: bool = True
) -> LoadedWeights:
    """Masters and weights from a Hugging Face safetensors folder (or the `weights/` of one of our checkpoints), in any
    dtype, MXFP4, or FP8 with block scales, in one file or several with an index.

    CheckpointError on all ranks names every tensor that is missing, unexpected or of another shape: nothing is ever
    left at random values. The optimizer's state is not touched. Tensors of our checkpoints are compared with their
    checksums; a third-party folder has none.

    Adapters saved with these weights are loaded too, and the weights of the model that were trained beside them.
    CheckpointError if there are any, and the model has none. head: new, the folder may be of a model with the head of
    another task; none, the folder's is left out. encodes: whether weights that are kept as quantized values are read
    from it too.
    """
    folder = folder_of(path)
    beside = together(mesh.world, lambda: adapter_folder(folder))
    holders = buffers.masters
    held: list[Held] = [(f, f.master) for f in holders]
    wanted_adapters = wanted_names(mesh, adapters_to_load(held))
    together(mesh.world, lambda: check_wanted(folder, beside, wanted_adapters))
    base = wanted_names(mesh, [], encoded_shapes(buffers)) if encodes else {}
    wanted = {**wanted_names(mesh, masters_to_load(held)), **base}
    at = agree_on(mesh.world, str(path))
    check_base(at, mesh.world)
    new = together(mesh.world, lambda: lacking_head(at, wanted)) if head == "new" else frozenset[str]()
    wanted = {name: shape for name, shape in wanted.items() if name not in new}
    index = together(mesh.world, lambda: _weights_index(at, wanted, base, head == "none"))
    known = Index()
    if beside is not None:
        wanted_beside = wanted_names(mesh, adapters_to_load(held, exported=True))
        known = together(mesh.world, lambda: fitting(beside.index, wanted_beside, str(beside.path)))
    threads = threads_of_rank(mesh.world)

    def fill_masters(chosen: Iterable[FlatBucket | MatrixHome]) -> None:
        with ExitStack() as until_filled:
            here: list[Held] = [(f, until_filled.enter_context(staged(f.master))) for f in chosen]
            plain = [
                (item, index[item.name])
                for item in masters_to_load(here)
                if item.name not in known and item.name in index
            ]
            fill(plain, at.folder, at.receipts, threads)
            if beside is not None:
                found = [(item, known[item.name]) for item in adapters_to_load(here, exported=True)]
                fill(found, beside.path, beside.receipts, threads)

    def fill_holders() -> None:
        for f in (f for f in buffers.flat if f.homed):
            f.master.zero_()  # type: ignore[union-attr]  # the masters are elsewhere
        fill_masters(f for f in holders if not isinstance(f.master, PackedTensor))
        for f in (f for f in holders if isinstance(f.master, PackedTensor)):
            fill_masters([f])

    agree(mesh.world, fill_holders)
    if encodes:
        agree(mesh.world, lambda: encode_from(buffers, index, at.folder, at.receipts))
    _publish(buffers)
    return LoadedWeights(beside is not None, new)


def load_base(path: str | Path, buffers: Buffers, mesh: Mesh) -> None:
    """Of the weights in a folder, as of `load_weights`, those alone that are kept as quantized values (lora.base): the
    base of adapters whose checkpoint has been loaded."""
    base = wanted_names(mesh, [], encoded_shapes(buffers))
    wanted = {**wanted_names(mesh, masters_to_load([(f, f.master) for f in buffers.masters])), **base}
    at = agree_on(mesh.world, str(path))
    check_base(at, mesh.world)
    index = together(mesh.world, lambda: _weights_index(at, wanted, base))
    agree(mesh.world, lambda: encode_from(buffers, index, at.folder, at.receipts))


def load_adapters(index: Index, receipts: Mapping[str, Receipt | None], buffers: Buffers, mesh: Mesh) -> None:
    """The weights of adapters from files of their own, which the index names by their whole paths. receipts: by file;
    None: it has no checksums. CheckpointError as of `load_weights`."""
    holders = [f for f in buffers.masters if f.bucket.trained]
    wanted = wanted_names(mesh, adapters_to_load([(f, f.master) for f in holders], exported=True))
    known = together(mesh.world, lambda: fitting(index, wanted, "what adapters add"))
    threads = threads_of_rank(mesh.world)

    def fill_adapters() -> None:
        with ExitStack() as until_filled:
            held: list[Held] = [(f, until_filled.enter_context(staged(f.master, clear=False))) for f in holders]
            items = adapters_to_load(held, exported=True)
            fill([(item, known[item.name]) for item in items], Path(), receipts, threads)

    agree(mesh.world, fill_adapters)
    _publish(buffers)


def lacking_head(at: WeightsAt, wanted: Shapes) -> frozenset[str]:
    """Tensors of the model's head that the folder has not."""
    pattern, there = tensors_of(wanted).others, base_index(at, wanted)
    return frozenset(name for name in wanted if name not in there and pattern and re.fullmatch(pattern, name))


def _weights_index(at: WeightsAt, wanted: Shapes, base: Shapes, headless: bool = False) -> Index:
    index = base_index(at, wanted, headless)
    check_base_there(index, base, at.folder, at.receipts is not None)
    return fitting(index, wanted, str(at.folder))


@torch.no_grad()
def _publish(buffers: Buffers) -> None:
    buffers.publish()
    buffers.ready()
