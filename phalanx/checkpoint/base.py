"""The base of adapters by name: where the weights lie that a checkpoint's adapters belong to, and whether they are
still those.

A run with `lora` whose weights come from a folder never writes them again: its checkpoints name the folder and the
checksums of its files (manifest.Base). Whatever reads such a checkpoint reads the weights there, once the checksums
have been compared. A base without a folder (random initial weights) is in the checkpoint's own `weights/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.agree import agree
from phalanx.checkpoint.hf_files import INDEX, Shapes, adapt, folder_of, hf_files, same_in, stored_in
from phalanx.checkpoint.manifest import NAME, Base, parse, read_checked, read_manifest
from phalanx.checkpoint.objects import storage_for
from phalanx.checkpoint.places import is_remote, missing, place
from phalanx.checkpoint.storage import Receipt, sum_of, temporary, write_file
from phalanx.checkpoint.tensors import CheckedFile, Index, PlainFile, lately, open_tensors, receipt_of
from phalanx.checkpoint.threads import in_threads, threads_of_rank
from phalanx.comm.axis import Axis

ALONE = Axis("alone")


@dataclass(frozen=True)
class WeightsAt:
    """Where a model's weights are read.

    folder    a Hugging Face folder
    receipts  of its files, with which what is read is compared; None: they have none
    base      what its files must be, if it is the base of adapters saved elsewhere; `owner` is their checkpoint
    """

    folder: Path
    receipts: dict[str, Receipt] | None
    base: Base | None = None
    owner: Path | None = None


def weights_at(folder: Path, moved: str | None = None) -> WeightsAt:
    """Where the weights are that a folder stands for: in it, unless it is the `weights` of a checkpoint that names its
    base. moved: where the user says that this base is now. CheckpointError if it is nowhere."""
    owner = folder.parent
    if folder.name != "weights" or not (owner / NAME).is_file():
        return WeightsAt(folder, None)
    manifest = read_manifest(owner)
    if manifest.base is None:
        return WeightsAt(folder, weight_receipts(folder))
    return base_at(owner, manifest.base, moved)


def base_at(owner: Path, base: Base, moved: str | None = None) -> WeightsAt:
    """The same for the base that the checkpoint `owner` names."""
    given = None if moved is None else folder_of(moved)
    if given is not None and given.is_dir():
        at = weights_at(given)  # which may be a checkpoint that names the same base
        return WeightsAt(at.folder, at.receipts, base, owner)
    there = place(base.folder)
    if not there.is_dir():
        raise CheckpointError(
            f"the base of the adapters in {owner} is not where it was: {missing(there, 'folder')}{HINT}"
        )
    return WeightsAt(there, weight_receipts(there), base, owner)


HINT = (
    ". If it moved, a run is continued with init_from=FOLDER, and `phalanx checkpoint rebase CHECKPOINT FOLDER` writes "
    "the new place into a checkpoint"
)


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


def name_base(path: str, world: Axis) -> Base:
    """The base of a run's adapters: the folder of weights that the run starts from, with the checksums of its files,
    which the ranks compute together. If those are adapters over a base, it is theirs."""
    at = agree_on(world, path)
    if at.base is not None:
        return replace(at.base, folder=lasting(at.folder))
    return Base(lasting(at.folder), _sums(at.folder, _files(at.folder), world))


def agree_on(world: Axis, path: str) -> WeightsAt:
    """`weights_at` of a path, found on all ranks or refused on all."""
    made: list[WeightsAt] = []
    agree(world, lambda: made.append(weights_at(folder_of(path))))
    return made[0]


def check_base(at: WeightsAt, world: Axis = ALONE, hint: str = HINT) -> None:
    """Compare the files of a base with the checksums that its adapters were saved with; the ranks divide the work.
    CheckpointError with both checksums of the first that differs. hint: how it ends."""
    if at.base is None:
        return
    wanted = at.base.files
    there = {name: receipt for name, receipt in wanted.items() if (at.folder / name).is_file()}
    found = _sums(at.folder, there, world)
    for name, receipt in wanted.items():
        have = found.get(name)
        if have is None or (have.size, have.xxh3) != (receipt.size, receipt.xxh3):
            is_now = "is not there" if have is None else f"has {have.size} bytes with checksum {have.xxh3}"
            raise CheckpointError(
                f"{at.folder} is not the base of the adapters in {at.owner}: its {name} {is_now}; theirs has "
                f"{receipt.size} bytes with checksum {receipt.xxh3}{hint}"
            )


def check_served_base(owner: Path, weights: Path, world: Axis = ALONE) -> None:
    """The same of weights over which the adapters of the checkpoint `owner` are to be applied, wherever these have
    their own base."""
    manifest, own = read_manifest(owner), owner / "weights"
    receipts = manifest.receipts("weights")
    files = {name: Receipt(r.size, r.xxh3) for name, r in receipts.items() if r.parts or name == INDEX}
    base = Base(str(own), files) if manifest.base is None else manifest.base
    hint = f". Over other weights: phalanx export {owner} --to peft -o FOLDER, whose base is not compared"
    check_base(replace(weights_at(weights), base=base, owner=owner), world, hint)


def base_index(at: WeightsAt, wanted: Shapes, headless: bool = False) -> Index:
    """Where the model's tensors lie in a folder, under the model's names. headless: as of `adapt`."""
    same = same_in(at.folder, at.receipts)
    return adapt(stored_in(at.folder, at.receipts), wanted, str(at.folder), same, headless)


@contextmanager
def reading(path: str, wanted: Shapes, headless: bool = False) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads whole tensors of the model at a path, by their names. wanted: those of the whole model;
    headless: as of `adapt`."""
    at = weights_at(folder_of(path))
    index = base_index(at, wanted, headless)

    def opener(name: str) -> CheckedFile | PlainFile:
        return open_tensors(at.folder / name, receipt_of(at.receipts, at.folder, name))

    with lately(opener) as files:

        def read(name: str) -> Tensor:
            stored = index[name]
            pieces = [part.read(files, part.box.within(part.box)) for part in stored.parts]
            if len(pieces) == 1:
                return pieces[0]
            whole = torch.empty(stored.shape, dtype=pieces[0].dtype)
            for part, piece in zip(stored.parts, pieces):
                whole[part.box.slices()] = piece
            return whole

        yield read


def base_problems(checkpoint: Path) -> list[str]:
    """What is wrong with the base that a checkpoint names: [] if nothing is, or it names none."""
    base = parse(checkpoint).base
    try:
        if base is not None:
            check_base(base_at(checkpoint, base))
    except CheckpointError as error:
        return [str(error)]
    return []


def rebase(checkpoint: Path, path: str) -> str:
    """Write into a checkpoint's manifest where its base is now, once the checksums have been compared. Returns it."""
    manifest = parse(checkpoint)
    if manifest.base is None:
        raise CheckpointError(f"{checkpoint} names no base: its weights are its own")
    if not folder_of(path).is_dir():
        raise CheckpointError(missing(folder_of(path), "folder"))
    at = base_at(checkpoint, manifest.base, path)
    check_base(at)
    made = replace(manifest, base=replace(manifest.base, folder=lasting(at.folder)))
    storage, text = storage_for(checkpoint), made.text().encode()
    new = checkpoint / NAME if is_remote(checkpoint) else temporary(checkpoint, "base") / NAME
    if not is_remote(checkpoint):
        storage.make_folder(new.parent)
    write_file(storage, new, [text])  # an object appears whole
    if not is_remote(checkpoint):
        storage.rename(new, checkpoint / NAME)
        storage.sync_folder(checkpoint)
        storage.remove_folder(new.parent)
    return lasting(at.folder)


def _files(folder: Path) -> list[str]:
    """Names of the files that hold a folder's weights."""
    return [*hf_files(folder), *([INDEX] if (folder / INDEX).is_file() else [])]


def _sums(folder: Path, names: Iterable[str], world: Axis) -> dict[str, Receipt]:
    """Sizes and checksums of files: those that the manifest of one of our checkpoints states, or else computed."""
    known, threads = weight_receipts(folder), threads_of_rank(world)
    mine = list(names)[world.index :: world.size]
    found: dict[str, Receipt] = {}

    def worker(tasks: Iterator[str]) -> None:
        for name in tasks:
            found[name] = Receipt((folder / name).stat().st_size, sum_of(folder / name))

    def work() -> dict[str, dict[str, object]]:
        in_threads(mine if known is None else [], worker, threads)
        if known is not None:
            found.update((name, Receipt(known[name].size, known[name].xxh3)) for name in mine if name in known)
        return {name: asdict(receipt) for name, receipt in found.items()}

    return {name: Receipt(**r) for answer in agree(world, work) for name, r in answer.items()}


def lasting(folder: Path) -> str:
    """Its place, whatever the working directory."""
    return str(folder) if is_remote(folder) else str(folder.resolve())
