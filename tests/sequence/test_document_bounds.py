"""What a batch says of its documents without counting them on the device: how many there are at most, and how long the
longest is. Attention kernels are started with these bounds: what lies beyond would be left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.config import DataConfig
from phalanx.data.loader import train_loader
from phalanx.inference.streams import encoder_batch
from phalanx.models.qwen_vl_blocks import in_windows
from phalanx.ops.attention.flash import spans_of
from phalanx.sequence.batch import Batch
from phalanx.sequence.patches import PatchForm
from phalanx.sequence.sample import UnitRoom, Units
from phalanx.sequence.shard import SequenceShard
from phalanx.sequence.units import unit_batch

FORM = PatchForm(2, side=2, window=4, largest=400)


def check_bounds(batch: Batch) -> None:
    """Documents here and in whole sequences are within their bounds."""
    for each in (batch, batch.uncut):
        if each.documents is not None:
            sizes = torch.bincount(each.documents)
            assert int(sizes.max()) <= each.longest <= each.seq_length
            assert len(sizes) <= each.room_for_documents
    spans = spans_of(batch.uncut)
    assert spans.offsets[-1] == batch.all_tokens and int(spans.offsets.diff().max()) <= spans.longest


@pytest.mark.parametrize("packing", ["window", "online"])
def test_what_the_loader_makes(packing):
    loader = train_loader(
        DataConfig(mock=True, packing=packing, document_attention=True),
        seq_length=64,
        seed=3,
        vocab_size=99,
        samples=64,
    )
    tighter = set()
    for first in range(0, 24, 3):
        batch = loader.batch(range(first, first + 3))
        check_bounds(batch)
        check_bounds(batch.chunked(5))
        assert batch.chunked(5).longest == 5
        for part in SequenceShard(0, 4).all:
            check_bounds(batch.cut(part))
        tighter.add(batch.longest)
        assert batch.longest == torch.bincount(batch.documents).max()  # no more than needed
    assert len(tighter) > 1


SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(per_sample=st.lists(SIZES, min_size=1, max_size=3), ranks=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
def test_windows_of_images(per_sample, ranks):
    """Each window is a document, none is longer than a full one, and there is little more room than windows."""
    found = [units_of(sizes) for sizes in per_sample]
    whole = unit_batch(found, range(len(found)), UnitRoom(FORM.stream, 10**6, "data.room.patches"))
    windows = sum(-(-rows * 2 // 4) * -(-columns * 2 // 4) for sizes in per_sample for rows, columns in sizes)
    for i in range(ranks[0]):
        for j in range(ranks[1]):
            patches = whole.cut(SequenceShard(i, ranks[0], rank=j, ranks=ranks[1]))
            check_bounds(patches)
            inside = in_windows(patches, FORM)
            check_bounds(inside)
            assert inside.longest == min(16, patches.num_tokens)
            assert inside.room_for_documents <= 4 * windows + 3 * patches.room_for_documents
            real = patches.real > 0
            seen = torch.stack((patches.documents, patches.coordinates[:, -1]), 1)[real].unique(dim=0)
            assert len(inside.documents[real].unique()) == len(seen)


def units_of(sizes: list[tuple[int, int]]) -> Units:
    """Images of so many squares of patches, without values."""
    images = [FORM.blank(4 * rows, 4 * columns) for rows, columns in sizes]
    filled = [replace(image, values=np.zeros((image.sizes[0], FORM.width), np.float32)) for image in images]
    return Units.together(filled, FORM.stream)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 700), max_size=4), multiple=st.sampled_from([1, 4, 600]))
def test_texts_of_an_encoder_in_generation(lengths, multiple):
    check_bounds(encoder_batch([[1] * length for length in lengths], multiple))
