"""Convolutions of queries, keys and values in tensors of their own (OLMo Hybrid as published), read as the one tensor
that has all their channels.

    X.q_conv1d.weight, X.k_conv1d.weight, X.v_conv1d.weight (channels, 1, taps)   X.conv1d.weight

transformers writes them in three even parts, whatever the widths of queries and values: joined, these are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from phalanx.checkpoint.tensors import Index, Stored
from phalanx.layout.box import Box

WHOLE, PARTS = ".conv1d.weight", (".q_conv1d.weight", ".k_conv1d.weight", ".v_conv1d.weight")


def joined(index: Index, wanted: Mapping[str, tuple[int, ...]]) -> Index:
    """The index with one convolution of a layer in the place of three, where the model has one."""
    found = dict(index)
    for name in wanted:
        at = name.removesuffix(WHOLE)
        names = [at + part for part in PARTS]
        if at == name or name in index or not index.keys() >= set(names):
            continue
        parts, first = [], 0
        for one in names:
            stored = found.pop(one)
            channels, (part,) = stored.shape[0], stored.parts
            rest = stored.shape[1:]
            parts.append(replace(part, box=Box((first, *(0 for _ in rest)), (first + channels, *rest))))
            first += channels
        found[name] = Stored((first, *rest), parts)
    return found
