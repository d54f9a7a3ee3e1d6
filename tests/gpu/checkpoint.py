"""Files of a checkpoint that come to a GPU: every element lies where it belongs, however the target lies in memory
and whatever its dtype."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.boxes import Item
from phalanx.checkpoint.storage import Storage
from phalanx.checkpoint.tensors import Stored, StoredBox, fill, write_tensors
from phalanx.layout.box import Box
from phalanx.layout.param import Piece
from phalanx.nn.initial import ZEROS

KINDS = ("whole", "rows", "columns", "transposed", "rounded")


def checkpoint_checks() -> dict[str, Callable[[torch.device], str]]:
    return {"files of a checkpoint come to the device": check_fill}


def check_fill(device: torch.device) -> str:
    """12 tensors of up to 36 MB in two files: whole, some rows, some columns, transposed targets, two targets that
    share rows, another dtype."""
    pick = torch.Generator().manual_seed(0)
    shapes = [
        (int(torch.randint(1, 9001, (), generator=pick)), int(torch.randint(1, 1001, (), generator=pick)))
        for _ in range(12)
    ]
    truth = {f"t{n}": torch.randn(shape, generator=pick) for n, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as name:
        folder, names = Path(name), list(truth)
        halves = {"one": names[::2], "two": names[1::2]}
        receipts = {
            file: write_tensors(
                Storage(),
                folder / file,
                [(n, tuple(truth[n].shape), torch.float32) for n in those],
                [truth[n] for n in those],
            )
            for file, those in halves.items()
        }
        file_of = {n: file for file, those in halves.items() for n in those}
        for kinds in (KINDS, *((kind,) for kind in KINDS)):  # all that a tensor goes to at once, then one by one
            wanted, expected = list[tuple[Item, Stored]](), list[tuple[str, Tensor, Tensor]]()
            for n, whole in truth.items():
                stored = Stored(tuple(whole.shape), [StoredBox(file_of[n], n, Box.full(tuple(whole.shape)))])
                for what, box, target in (t for t in targets(whole, device) if t[0] in kinds):
                    wanted.append((Item(piece_of(n, tuple(whole.shape)), box, target), stored))
                    expected.append((f"{n} {what}", target, whole[box.slices()].to(target.dtype)))
            fill(wanted, folder, receipts, 8)
            for what, target, right in expected:
                if not torch.equal(target.cpu(), right):
                    raise AssertionError(f"{what}: {(target.cpu() != right).sum()} of {right.numel()} elements differ")
    return f"{sum(t.nbytes for t in truth.values()) / 1e9:.2f} GB, to {len(KINDS)} kinds of places"


def targets(whole: Tensor, device: torch.device) -> list[tuple[str, Box, Tensor]]:
    rows, columns = whole.shape
    third = Box((rows // 3, 0), (max(rows // 3 + 1, 2 * rows // 3), columns))
    right = Box((0, columns // 2), (rows, columns))
    full = Box.full((rows, columns))

    def empty(box: Box, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(box.shape, 5.0, dtype=dtype, device=device)

    return [
        ("whole", full, empty(full)),
        ("rows", third, empty(third)),
        ("columns", right, empty(right)),
        ("transposed", full, empty(Box.full((columns, rows))).t()),
        ("rounded", full, empty(full, torch.bfloat16)),
    ]


def piece_of(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name, shape, Box.full(shape), tuple(slice(0, n) for n in shape), ZEROS)
