"""Where the quantized values of a bucket's frozen matrices lie (lora.base): values only, known before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.base.align import BYTES, ELEMENTS, room
from phalanx.base.dataclass import dataclass
from phalanx.layout.box import Box
from phalanx.layout.buckets import Bucket, Slot
from phalanx.layout.param import Piece
from phalanx.layout.strided import StridedBox, boxes_in
from phalanx.ops.quantized.base_formats import FORMATS, BaseFormat, EncodedBox, MatrixBox
from phalanx.ops.quantized.base_weights import EncodedMatrices, EncodedMatrix


@dataclass(frozen=True)
class BaseMatrix:
    """A matrix of a bucket, or the part of it that is here. at: of a stack of matrices that is one global tensor, its
    number in each dim before the last two."""

    slot: Slot
    piece: Piece
    at: tuple[int, ...]
    placed: EncodedMatrix

    @property
    def source(self) -> Box:
        """The box of the global tensor whose values are needed to encode it."""
        box = self.placed.encoded.source
        return Box((*self.at, *box.start), (*(i + 1 for i in self.at), *box.stop))

    @property
    def source_piece(self) -> Piece:
        """The same as a piece whose storage is the box itself."""
        box = self.source
        local = tuple(slice(0, n) for n in box.shape)
        return Piece(self.piece.name, self.piece.shape, box, local, self.piece.init)


@dataclass(frozen=True)
class EncodedBucket:
    """nbytes: of all its matrices, without padding for shards."""

    format: BaseFormat
    matrices: tuple[BaseMatrix, ...]
    nbytes: int

    @property
    def decoded(self) -> EncodedMatrices:
        return EncodedMatrices(self.format, tuple(m.placed for m in self.matrices))


def encoded_bucket(bucket: Bucket) -> EncodedBucket:
    """Of a bucket that has a base_format. The bytes of a matrix follow each other, so that a rank that holds a shard of
    them reads few matrices."""
    format, found, at = FORMATS[str(bucket.base_format)], list[BaseMatrix](), 0
    for slot, piece, each in _matrices(bucket):
        lead, start, stop = each.box.start[:-2], each.box.start[-2:], each.box.stop[-2:]
        encoded = EncodedBox(format, MatrixBox(piece.shape[-2:], start, stop))  # type: ignore[arg-type]
        placed = EncodedMatrix(encoded, at, each.offset, each.stride[-2:])  # type: ignore[arg-type]
        found.append(BaseMatrix(slot, piece, lead, placed))
        at += room(encoded.nbytes, BYTES)
    return EncodedBucket(format, tuple(found), at)


def _matrices(bucket: Bucket) -> Iterator[tuple[Slot, Piece, StridedBox]]:
    for slot in bucket.slots:
        one = Bucket(0, (slot,), bucket.numel, bucket.users)
        for box in boxes_in(one, slot.offset, slot.offset + slot.numel):
            yield from ((slot, box.piece, each) for each in box.matrices())


def stored_bytes(bucket: Bucket, shards: int = 1) -> int:
    """Bytes of a bucket's quantized values, padded so that they divide into equal, aligned shards."""
    return room(encoded_bucket(bucket).nbytes, ELEMENTS * shards)
