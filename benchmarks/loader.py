"""Tokens per second of one process's loader: made-up token files in the file cache, shuffled windows.

`thread`: micro-batches taken from the prefetcher, as training does, by the clock; whatever else the machine does
counts. `loader`: the same work without the thread, per second of processor time.

python benchmarks/loader.py [--tokens 100e6] [--seconds 3] [--repeats 5]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from phalanx.data.config import DataConfig
from phalanx.data.index import CorpusWriter
from phalanx.data.loader import LOOKED_UP, Loader, Prefetcher, train_loader

VOCABULARY = 50257
DOCUMENT = 700  # tokens on average


def write_corpus(prefix: Path, tokens: int, seed: int) -> None:
    """Random ids in documents of random length."""
    dice = np.random.default_rng(seed)
    with CorpusWriter(prefix, np.uint16) as writer:
        while writer.num_tokens < tokens:
            ids = dice.integers(0, VOCABULARY, 1 << 20, dtype=np.uint16)
            for document in np.split(ids, np.sort(dice.integers(1, len(ids), len(ids) // DOCUMENT))):
                if len(document):
                    writer.add_document(document)


def measure(loader: Loader, micro_batch: int, seconds: float) -> float:
    """Tokens per second of a thread that does nothing but take batches."""
    lists = (range(first, first + micro_batch) for first in itertools.count(0, micro_batch))
    with Prefetcher(loader, lists, depth=8) as batches:
        for _ in range(50):
            next(batches)
        tokens, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds:
            tokens += next(batches).num_tokens
    return tokens / took


def measure_alone(loader: Loader, micro_batch: int, seconds: float) -> float:
    """Tokens per second of processor time, looking samples up as the prefetcher does."""
    tokens, first, began = 0, 0, time.thread_time()
    while True:
        places = loader.locate(range(first, first + LOOKED_UP))
        first += LOOKED_UP
        for at in range(0, LOOKED_UP, micro_batch):
            tokens += loader.read(places[at : at + micro_batch]).num_tokens
            if (took := time.thread_time() - began) > seconds:
                return tokens / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=float, default=100e6)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefixes = [str(Path(folder) / name) for name in "ab"]
        for seed, prefix in enumerate(prefixes):
            write_corpus(Path(prefix), int(options.tokens / 2), seed)
        print("M tokens/s: median (lowest, highest)")
        print(f"{'sequence':>8} {'micro-batch':>11} {'sources':>7} {'documents':>9} {'thread':>26} {'loader':>26}")
        for seq_length, micro_batch, sources, documents in itertools.product(
            (1024, 8192), (1, 32), (1, 2), (False, True)
        ):
            config = DataConfig(paths=tuple(prefixes[:sources]), document_attention=documents)
            loader = train_loader(config, seq_length=seq_length, seed=1, vocab_size=VOCABULARY, samples=1)
            shown = []
            for how in (measure, measure_alone):
                rates = sorted(how(loader, micro_batch, options.seconds) / 1e6 for _ in range(options.repeats))
                shown.append(f"{statistics.median(rates):.1f} ({rates[0]:.1f}, {rates[-1]:.1f})")
            attention = "yes" if documents else "no"
            print(
                f"{seq_length:>8} {micro_batch:>11} {sources:>7} {attention:>9} {shown[0]:>26} {shown[1]:>26}",
                flush=True,
            )


if __name__ == "__main__":
    main()
