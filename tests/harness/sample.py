"""Which of a large set of cases `make test` runs; `make soak` runs all."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping
from itertools import combinations, product
from types import MappingProxyType

import pytest

from phalanx.base.rules import default_of
from phalanx.config.run import Run

OF_TRAIN = ("recompute", "recompute_ops", "precision", "fp8", "freeze", "cuda_graphs", "kernels", "deterministic")


def covering(
    cases: Mapping[str, Iterable[Hashable]], ranks: Mapping[str, int] = MappingProxyType({}), seed: int = 20261122
) -> list[str]:
    """Names of a few cases that together have every feature of any: again and again the one with the most features
    that are still missing for what it costs, and of several such the first in an order drawn by seed. `ranks` of a
    case share a machine: one more costs as much as what any case costs."""
    order = random.Random(seed).sample(sorted(cases), len(cases))
    own = {name: set(cases[name]) for name in order}
    missing, chosen = set[Hashable]().union(*own.values()), set[str]()
    while missing:
        best = max(order, key=lambda name: len(own[name] & missing) / (1 + ranks.get(name, 1)))
        chosen.add(best)
        missing -= own[best]
    return [name for name in cases if name in chosen]


def rest_in_soak(names: Iterable[Hashable], chosen: Iterable[Hashable]) -> list:
    """All names (or numbers, ...) as parameters of a test; those that are not chosen are for `make soak`."""
    chosen = set(chosen)
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.soak) for name in names]


def pairs_in_test(*axes: Iterable[Hashable]) -> list:
    """All combinations of the axes' values as parameters of a test. `make test` runs a few that together have every
    pair of values of any two axes; `make soak` runs the others too."""
    cases = {str(number): values for number, values in enumerate(product(*axes))}
    chosen = covering({name: combinations(enumerate(values), 2) for name, values in cases.items()})
    return [pytest.param(*v, marks=() if name in chosen else pytest.mark.soak) for name, v in cases.items()]


def each_in_two(cases: Iterable[Hashable], layouts: Iterable[Hashable]) -> list:
    """All combinations as parameters of a test. `make test` runs each case in the first layout and in one of the
    others, which take turns; `make soak` runs the rest too."""
    first, *others = layouts
    return [
        pytest.param(case, layout, marks=() if layout in (first, others[n % len(others)]) else pytest.mark.soak)
        for n, case in enumerate(cases)
        for layout in (first, *others)
    ]


def features(run: Run) -> set[Hashable]:
    """Of a run: its family, and each option of its layout (and those of `train` that change what is computed) that
    is not the default."""
    options = [("layout", run.layout, name) for name in vars(run.layout)] + [
        ("train", run.train, name) for name in OF_TRAIN
    ]
    changed = {
        (f"{section}.{name}", repr(getattr(c, name)))
        for section, c, name in options
        if getattr(c, name) != default_of(type(c), name)
    }
    base = set() if run.lora is None else {("lora.base", run.lora.base)}
    return {run.model.family, *changed, *base}
