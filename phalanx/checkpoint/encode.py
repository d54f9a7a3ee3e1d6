"""Read frozen weights that are kept as quantized values (lora.base): matrix by matrix, so that no more than one is ever
there in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.boxes import Item
from phalanx.checkpoint.hf_files import Shapes
from phalanx.checkpoint.storage import Receipt
from phalanx.checkpoint.tensors import Index, reader
from phalanx.data_parallel.base_storage import BaseStorage, RoundedBase
from phalanx.data_parallel.buffers import Buffers
from phalanx.ops.quantized.base_bucket import BaseMatrix


def encoded_shapes(buffers: Buffers) -> Shapes:
    """Names and shapes of the global tensors of which this rank has such a matrix."""
    return {matrix.piece.name: matrix.piece.shape for _, matrix in buffers.encoded}


def check_base_there(index: Index, wanted: Shapes, folder: Path, ours: bool) -> None:
    """CheckpointError if the folder of a checkpoint of `ours` lacks such weights."""
    lost = [name for name in wanted if name not in index]
    if lost and ours:
        raise CheckpointError(
            f"{folder} does not hold {lost[0]}{f' and {len(lost) - 1} more' * (len(lost) > 1)}: the base of these "
            "adapters is kept as quantized values (lora.base), and a checkpoint does not hold it"
        )


def encode_from(buffers: Buffers, index: Index, folder: Path, receipts: Mapping[str, Receipt | None] | None) -> None:
    """All such weights of this rank, from the files of a folder. index, receipts: as of checkpoint.tensors.fill.
    CheckpointError for a weight that is not finite."""
    device = next((keeper.weight.device for keeper, _ in buffers.encoded), torch.device("cpu"))

    def values(keeper: BaseStorage | RoundedBase, matrix: BaseMatrix) -> Tensor:
        piece = matrix.source_piece
        found = torch.empty(piece.box.shape, dtype=keeper.weight.dtype, device=device)
        read(Item(piece, piece.box, found), index[piece.name])
        return found

    with reader(folder, receipts, device) as read:
        for keeper, matrix in buffers.encoded:
            keeper.encode(matrix, values(keeper, matrix))  # no name holds it while the next is read
