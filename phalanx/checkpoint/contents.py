"""Contents: the global tensors of a checkpoint or a Hugging Face folder, read one at a time in one process, with every
byte checked as in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.adapters import adapter_folder
from phalanx.checkpoint.base import base_at, base_index, check_base, weight_receipts
from phalanx.checkpoint.hf_files import Shapes, hf_index
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.load import frozen_names_of, kinds_of_names, state_index, state_kinds
from phalanx.checkpoint.manifest import NAME, Manifest, read_manifest
from phalanx.checkpoint.places import missing, place
from phalanx.checkpoint.save import key_of
from phalanx.checkpoint.tensors import CheckedFile, PlainFile, Stored, StoredBox, TensorFolder, open_tensors, receipt_of
from phalanx.ops.optimizer.shard import MASTER

WEIGHTS = "weights"


class Contents:
    """Tensors by kind: `weights` as they are exported and, in a checkpoint of ours, `state_kinds`: `master` and the
    optimizer's state (for AdamW `m` and `v`). Files stay open until `close`. The weights of a checkpoint that names the
    base of its adapters are read there, once all checksums have been compared.

    untrained   names of tensors that have no gradients; frozen: of those that have no masters: their values are the
                `weights`, or of adapters' those in their folder
    """

    def __init__(self, path: str | Path):
        self.path, self.manifest = _meant(path)
        self.weights = self.path / WEIGHTS if self.manifest else self.path
        self._open = ExitStack()
        self._files: dict[Path, CheckedFile | PlainFile] = {}
        self._beside = None if self.manifest is None else adapter_folder(self.weights)
        names = [] if self.manifest is None else frozen_names_of(self.path, self.manifest)
        self.frozen = frozenset(names)
        self._kinds: dict[str, list[TensorFolder]] = {WEIGHTS: self._weights()}
        self.state_kinds: tuple[str, ...] = ()
        self.kinds_of_names: dict[str, tuple[str, ...]] = {}
        if self.manifest is not None:
            self.state_kinds = state_kinds(self.path, self.manifest)
            self.kinds_of_names = kinds_of_names(self.path, self.manifest)
            state, kept = state_index(self.path, self.manifest), state_index(self.path, self.manifest, "kept")
            for kind in self.state_kinds:
                having = {n: s for n, s in state.items() if kind in self.kinds_of_names.get(n, self.state_kinds)}
                index = {**having, **kept} if kind == MASTER else having
                keyed = {
                    n: Stored(s.shape, [replace(p, key=key_of(kind, n, p.box)) for p in s.parts])
                    for n, s in index.items()
                }
                self._kinds[kind] = [TensorFolder(self.path / "state", keyed, self.manifest.receipts("state"))]
        self.untrained = frozenset(kept) if self.manifest is not None else frozenset[str]()

    def _weights(self) -> list[TensorFolder]:
        """Where the exported tensors lie: in a checkpoint that names a base, those that are trained with the adapters,
        and the others there."""
        if self.manifest is None or self.manifest.base is None:
            receipts = weight_receipts(self.weights) if self.manifest else None
            return [TensorFolder(self.weights, hf_index(self.weights, receipts), receipts)]
        at, beside = base_at(self.path, self.manifest.base), self._beside
        names = self.frozen if beside is None else self.frozen - beside.index.keys()
        check_base(at)
        wanted: Shapes = dict.fromkeys([*names, *state_index(self.path, self.manifest)], ())
        index = base_index(at, wanted)
        if lost := [name for name in names if name not in index]:
            raise DamagedCheckpoint(f"{at.folder} does not hold {lost[0]}")
        trained = {} if beside is None else {n: s for n, s in beside.index.items() if n in index}
        frozen = {n: index[n] for n in index if n in names}
        also = [] if beside is None else [TensorFolder(beside.path, trained, beside.receipts)]
        return [TensorFolder(at.folder, frozen, at.receipts), *also]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    @property
    def best(self) -> str:
        """The kind with the most exact weights."""
        return MASTER if MASTER in self._kinds else WEIGHTS

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        of_kind = {n: stored.shape for source in self._kinds.get(kind, ()) for n, stored in source.index.items()}
        if kind != MASTER:
            return of_kind
        found = {name: self._frozen_in(name).index[name].shape for name in sorted(self.frozen)}
        return {**of_kind, **found}

    def files(self, kind: str) -> dict[str, str]:
        """The file that holds each tensor as a whole, by the tensor's name."""
        return {name: stored.parts[0].file for source in self._kinds[kind] for name, stored in source.index.items()}

    def read(self, kind: str, name: str) -> Tensor:
        """A whole global tensor, assembled from the boxes that are stored."""
        if kind == MASTER and name in self.frozen:
            source = self._frozen_in(name)
        else:
            source = next(source for source in self._kinds[kind] if name in source.index)
        folder, stored, whole, found = source.folder, source.index[name], None, 0
        for part in stored.parts:
            piece = self._read(source, part)
            if whole is None:
                whole = torch.empty(stored.shape, dtype=piece.dtype)
            whole[part.box.slices()] = piece
            found += part.box.numel
        if whole is None or found != whole.numel():
            raise DamagedCheckpoint(f"{folder}: {found} elements of {name} {stored.shape} are stored")
        return whole

    def pairs(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        for name in self.shapes(kind):
            yield name, self.read(kind, name)

    def _frozen_in(self, name: str) -> TensorFolder:
        """Where a tensor lies that was frozen: the weights, or the adapters' folder."""
        found = next((source for source in self._kinds[WEIGHTS] if name in source.index), None)
        if found is not None:
            return found
        if self._beside is None or name not in self._beside.index:
            raise DamagedCheckpoint(f"{self.path} does not hold {name}")
        return TensorFolder(self._beside.path, self._beside.index, self._beside.receipts)

    def _read(self, source: TensorFolder, part: StoredBox) -> Tensor:
        if type(part) is StoredBox:
            return self._file(source, part.file).read(part.key)
        return part.read(partial(self._file, source), part.box.slices())

    def _file(self, source: TensorFolder, name: str) -> CheckedFile | PlainFile:
        path = source.folder / name
        if path not in self._files:
            opened = open_tensors(path, receipt_of(source.receipts, source.folder, name))
            self._open.callback(opened.__exit__, None, None, None)
            self._files[path] = opened
        return self._files[path]

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.close()


def _meant(path: str | Path) -> tuple[Path, Manifest | None]:
    """The folder of tensors for a path: a run (its newest checkpoint), a checkpoint, or a Hugging Face folder."""
    given = place(path)
    if not given.is_dir():
        raise CheckpointError(missing(given))
    if not (given / NAME).exists() and (given / "config.json").is_file():
        return given, None
    found = find(path)
    return found, read_manifest(found)
