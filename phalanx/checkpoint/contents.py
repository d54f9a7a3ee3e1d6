"""Contents: the global tensors of a checkpoint or a Hugging Face folder, read one at a time in one process, with every
byte checked as in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.checkpoint.hf_files import hf_index
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.load import frozen_index, kinds_of_names, state_index, state_kinds, weight_receipts
from phalanx.checkpoint.manifest import NAME, Manifest, read_manifest
from phalanx.checkpoint.places import missing, place
from phalanx.checkpoint.save import key_of
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import CheckedFile, Index, PlainFile, Stored, open_tensors, receipt_of
from phalanx.ops.optimizer.shard import MASTER

WEIGHTS = "weights"


class Contents:
    """Tensors by kind: `weights` as they are exported and, in a checkpoint of ours, `state_kinds`: `master` and the
    optimizer's state (for AdamW `m` and `v`). Files stay open until `close`.

    untrained   names of tensors that have no gradients; frozen: of those whose masters are the `weights`
    """

    def __init__(self, path: str | Path):
        self.path, self.manifest = _meant(path)
        self.weights = self.path / WEIGHTS if self.manifest else self.path
        self._open = ExitStack()
        self._files: dict[Path, CheckedFile | PlainFile] = {}
        receipts = weight_receipts(self.weights) if self.manifest else None
        self._kinds: dict[str, tuple[Path, Index, dict[str, Receipt] | None]] = {
            WEIGHTS: (self.weights, hf_index(self.weights, receipts), receipts)
        }
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
                self._kinds[kind] = (self.path / "state", keyed, self.manifest.receipts("state"))
        self.untrained = frozenset(kept) if self.manifest is not None else frozenset[str]()
        self.frozen = frozenset(frozen_index(self.path, self.manifest) if self.manifest is not None else ())

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._kinds)

    @property
    def best(self) -> str:
        """The kind with the most exact weights."""
        return MASTER if MASTER in self._kinds else WEIGHTS

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        of_kind = {name: stored.shape for name, stored in self._kinds[kind][1].items()} if kind in self._kinds else {}
        weights = self._kinds[WEIGHTS][1]
        return {**of_kind, **{n: weights[n].shape for n in sorted(self.frozen)}} if kind == MASTER else of_kind

    def files(self, kind: str) -> dict[str, str]:
        """The file that holds each tensor as a whole, by the tensor's name."""
        return {name: stored.parts[0].file for name, stored in self._kinds[kind][1].items()}

    def read(self, kind: str, name: str) -> Tensor:
        """A whole global tensor, assembled from the boxes that are stored."""
        folder, index, receipts = self._kinds[WEIGHTS if kind == MASTER and name in self.frozen else kind]
        stored, whole, found = index[name], None, 0
        for part in stored.parts:
            piece = self._file(folder, part.file, receipts).read(part.key)
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

    def _file(self, folder: Path, name: str, receipts: dict[str, Receipt] | None) -> CheckedFile | PlainFile:
        if folder / name not in self._files:
            opened = open_tensors(folder / name, receipt_of(receipts, folder, name))
            self._open.callback(opened.__exit__, None, None, None)
            self._files[folder / name] = opened
        return self._files[folder / name]

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
