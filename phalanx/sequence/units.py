"""Streams of units: rows of numbers that a batch carries beside its tokens, such as the patches of images.

    Sample.units ──unit_batch──▶ Batch.beside[name] ──cut──▶ the units of this rank of tp x cp, each whole

Where ranks of several replicas compute each other's units (layout.media_group), a rank's own are known when samples are
read, and what they become has a way to go (sequence.unit_route):

    Sample.units of all replicas ──SharedUnits──shared_unit_batch──▶ Batch.beside[name] of one rank

A micro-batch has as many rows as its units, up to a capacity that the plan knows. The text has a place for each feature
that they become (`joined` rows each); `feature_index` says which feature a token stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from phalanx.base.errors import DataError
from phalanx.sequence.batch import IGNORE, PADDING_RUN, Batch, PerBatch, UnitPlaces, room_for_documents
from phalanx.sequence.sample import SharedUnits, UnitRoom, Units, UnitStream
from phalanx.sequence.shard import SequenceShard
from phalanx.sequence.unit_route import route_of

FEATURE_INDEX = PerBatch[Tensor]()


def unit_batch(found: Sequence[Units], samples: Sequence[int], room: UnitRoom) -> Batch:
    """The stream of a micro-batch with these samples. Without any units it is one feature of padding. DataError if
    there are more rows than the samples have room for together."""
    check_room(found, room)
    return _unit_batch(found, samples, room.stream)


def shared_unit_batch(shared: SharedUnits, stream: UnitStream, part: SequenceShard) -> Batch:
    """The stream of a micro-batch on a rank that computes units of several replicas."""
    made = _unit_batch(shared.own.singly, shared.samples, stream)
    if made.units is None:
        raise TypeError("a stream of units has places")
    features = torch.arange(sum(shared.features[part.replica]))
    places = replace(made.units, sizes=shared.rows[part.replica], spots=features, route=route_of(shared, part))
    return replace(made, units=places)


def _unit_batch(found: Sequence[Units], samples: Sequence[int], stream: UnitStream) -> Batch:
    sizes = [size for units in found for size in units.sizes]
    owners = [number for number, units in zip(samples, found) for _ in units.sizes]
    rows = max(sum(sizes), stream.joined)
    padding = [min(PADDING_RUN, rows - first) for first in range(sum(sizes), rows, PADDING_RUN)]
    every, whole = [*sizes, *padding], Units.together(found, stream)
    documents = np.repeat(np.arange(len(every)), every)
    starts = np.concatenate([[0], np.cumsum(every)])[:-1]
    real = (np.arange(rows) < sum(sizes)).astype(np.int64)
    more = rows - sum(sizes)
    values = np.concatenate([whole.values, np.zeros((more, stream.width), whole.values.dtype)])
    coordinates = np.concatenate([whole.coordinates, np.zeros((more, stream.axes), np.int64)])
    return Batch(
        tokens=torch.zeros(rows, dtype=torch.int64),
        labels=torch.full((rows,), IGNORE, dtype=torch.int64),
        positions=torch.from_numpy(np.arange(rows) - starts[documents]),
        samples=torch.from_numpy(np.repeat(np.array([*owners, *[0] * len(padding)], np.int64), every)),
        num_sequences=1,
        seq_length=rows,
        documents=torch.from_numpy(documents),
        real=torch.from_numpy(real),
        most_documents=room_for_documents(len(every), rows),
        longest_document=max(every),
        values=torch.from_numpy(values),
        coordinates=torch.from_numpy(coordinates),
        units=UnitPlaces(tuple(sizes), stream.joined, torch.from_numpy(whole.features // stream.joined)),
    )


def check_room(found: Sequence[Units], room: UnitRoom) -> None:
    """DataError, which names the first unit that finds no room, if there are more rows than fit."""
    name, at = room.stream.name, 0
    total = sum(size for units in found for size in units.sizes)
    for units in found:
        for number, size in enumerate(units.sizes):
            at += size
            if at > room.capacity * len(found):
                which = units.names[number] if number < len(units.names) else f"number {number + 1} of its sample"
                raise DataError(
                    f"{which} has {size:,} {name} and finds no room: there are {total:,} in a micro-batch of "
                    f"{len(found)} sequences, each with room for {room.capacity:,}: "
                    f"{room.setting}={-(-total // len(found))} has it"
                )


def meta_units(stream: UnitStream, rows: int) -> Batch:
    """A stream with so many rows on the meta device: only its shapes are right."""
    rows = max(rows // stream.joined, 1) * stream.joined
    ids = torch.empty(rows, dtype=torch.int64, device="meta")
    coordinates = torch.empty(rows, stream.axes, dtype=torch.int64, device="meta")
    values = torch.empty(rows, stream.width, dtype=torch.float32, device="meta")
    places = UnitPlaces((min(stream.largest, rows),), stream.joined, ids[:: stream.joined])
    return Batch(ids, ids, ids, ids, 1, rows, ids, real=ids, values=values, coordinates=coordinates, units=places)


def feature_index(batch: Batch, name: str, token: int) -> Tensor:
    """(T,) for each token of this shard that is `token`: where the feature that it stands for is, among those of all
    ranks of tp x cp one after another; -1 for others. The k-th such token of the micro-batch stands for the k-th
    feature."""
    return FEATURE_INDEX.of(batch, lambda: _feature_index(batch, name, token), name, token)


def _feature_index(batch: Batch, name: str, token: int) -> Tensor:
    units = batch.beside[name].units
    if units is None:
        raise TypeError(f"{name} is no stream of units")
    if units.numbers is not None:
        spots = units.spots if len(units.spots) else units.spots.new_zeros(1)
        return spots[units.numbers.clamp(min=0)].where(units.numbers >= 0, -1)
    stands = batch.uncut.tokens == token
    number = (stands.cumsum(0) - 1).clamp(0, max(len(units.spots) - 1, 0))
    spots = units.spots if len(units.spots) else units.spots.new_zeros(1)
    return batch.take(spots[number].where(stands, -1)) if batch.whole is not None else spots[number].where(stands, -1)
