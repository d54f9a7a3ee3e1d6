"""How fast text becomes ids: MB of text a second on one core, each kind of tokenizer beside its library called
plainly, and Megatron's own loop.

    python benchmarks/prepare.py [--mb 16] [--text FOLDER] [--vocab-size 16384]

One process and one thread throughout; seconds are of CPU time, so that other programs disturb little. The text is
Python's standard library or that of --text; half of it, another half, trains the tokenizers. `prepare` reads the
documents as .jsonl and writes finished token files; the other columns only make ids in memory.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by the library at each call

import numpy as np

from phalanx.text.prepare import PrepareOptions, prepare, stdlib_files
from phalanx.text.readers import find_files
from phalanx.text.tokenizers import TRAINERS, Tokenizer, byte_tokenizer, load_tokenizer

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(b): b for b in PRINTABLE} | {
    chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in PRINTABLE)
}


def read(text: str | None, size: int) -> tuple[list[str], list[str]]:
    """(documents to train on, documents to encode), about `size` bytes each."""
    files = stdlib_files(4 * size) if text is None else list(find_files([text]))
    halves: tuple[list[str], list[str]] = [], []
    for half, names in zip(halves, (files[::2], files[1::2])):
        held = 0
        for name in names:
            if not name.stat().st_size:
                continue  # Megatron's loop keeps documents without text, ours does not
            half.append(name.read_text(encoding="utf-8", errors="replace").replace("\0", " "))
            held += len(half[-1].encode())
            if held >= size:
                break
    return halves


def tokenizers_of(
    training: list[str], vocab_size: int, folder: Path
) -> dict[str, tuple[Tokenizer, Callable[[list[str]], Any]]]:
    """kind -> (ours, the library called plainly)"""
    made: dict[str, tuple[Tokenizer, Callable[[list[str]], Any]]] = {}
    for kind, train in TRAINERS.items():
        made[kind] = with_library(train(training, vocab_size, folder / kind))
    made["bytes"] = with_library(byte_tokenizer())
    made["tiktoken"] = with_tiktoken(made["bpe"][0], folder)
    for model_type in ("unigram", "bpe"):
        made[f"sentencepiece {model_type}"] = with_sentencepiece(training, vocab_size, model_type, folder)
    return made


def with_library(ours: Any) -> tuple[Tokenizer, Callable[[list[str]], Any]]:
    return ours, lambda texts: [e.ids for e in ours._core.encode_batch(texts, add_special_tokens=False)]


def with_tiktoken(bpe: Any, folder: Path) -> tuple[Tokenizer, Callable[[list[str]], Any]]:
    """The trained vocabulary as ranks of cl100k_base, whose way to split is then used."""
    import tiktoken
    from tiktoken_ext import openai_public

    names = [
        name
        for name, _ in sorted(bpe._core.get_vocab().items(), key=lambda item: item[1])
        if name not in bpe.special_tokens
    ]
    merged = [token for token in (bytes(BYTE_OF[c] for c in name) for name in names) if len(token) > 1]
    ranks = {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *merged])}
    path = folder / "cl100k_base.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    openai_public.load_tiktoken_bpe = lambda *_, **__: ranks
    theirs = tiktoken.Encoding(**openai_public.cl100k_base())
    return load_tokenizer(path), lambda texts: [theirs.encode_ordinary(text) for text in texts]


def with_sentencepiece(
    training: list[str], vocab_size: int, model_type: str, folder: Path
) -> tuple[Tokenizer, Callable[[list[str]], Any]]:
    import sentencepiece

    prefix = folder / f"sp-{model_type}"
    lines = (line for text in training for line in text.splitlines() if line.strip())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(prefix),
        vocab_size=min(vocab_size, 8000),
        model_type=model_type,
        byte_fallback=True,
        character_coverage=0.995,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    return load_tokenizer(f"{prefix}.model"), lambda texts: theirs.encode(texts, num_threads=1)


def megatron_loop(lines: Path, prefix: Path, ours: Any) -> None:
    """Megatron's preprocessing as its tools/preprocess_data.py does it, in one process: a JSON line, its ids, its
    builder."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=ours.dtype.type)
    with open(lines, encoding="utf-8") as file:
        for line in file:
            ids = ours._core.encode(json.loads(line)["text"], add_special_tokens=False).ids
            ids.append(ours.eod)
            builder.add_document(torch.tensor(ids, dtype=torch.int64).numpy(), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def best(runs: int, call: Callable[[], Any]) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def in_batches(texts: list[str], call: Callable[[list[str]], Any]) -> None:
    for at in range(0, len(texts), 64):
        call(texts[at : at + 64])


def cpu() -> str:
    lines: Iterable[str] = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=16, help="MB of text to encode")
    parser.add_argument("--text", default=None, help="file or folder instead of Python's standard library")
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--runs", type=int, default=3, help="the fastest counts")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        measure(options, folder)
    finally:
        shutil.rmtree(folder)


def row(
    kind: str,
    ours: Tokenizer,
    library: Callable[[list[str]], Any],
    texts: list[str],
    size: float,
    lines: Path,
    folder: Path,
    runs: int,
) -> str:
    plain = size / best(runs, lambda: in_batches(texts, library))
    cold = size / best(1, lambda: in_batches(texts, ours.encode_raw))
    warm = size / best(runs, lambda: in_batches(texts, ours.encode_raw))
    whole = size / best(runs, lambda: prepare([lines], folder / "out", ours, PrepareOptions(overwrite=True)))
    return f"| {kind} | {plain:.2f} | {cold:.2f} | {warm:.2f} | {warm / plain:.1f} | {whole:.2f} |"


def measure(options: argparse.Namespace, folder: Path) -> None:
    training, texts = read(options.text, int(options.mb * 1e6))
    size = sum(len(text.encode()) for text in texts) / 1e6
    lines = folder / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    print(
        f"{cpu()}, Python {platform.python_version()}, {size:.1f} MB in {len(texts)} documents, vocabulary "
        f"{options.vocab_size}\n"
    )
    print(
        "| tokenizer | library, MB/s | ours, cold | ours, warm | warm / library | prepare, MB/s "
        "|\n|---|---|---|---|---|---|"
    )
    made = tokenizers_of(training, options.vocab_size, folder)
    for kind, pair in made.items():
        print(row(kind, *pair, texts, size, lines, folder, options.runs), flush=True)
    bpe: Any = made["bpe"][0]
    encode_fast = bpe._core.encode_batch_fast
    fast = size / best(
        options.runs,
        lambda: in_batches(texts, lambda some: [e.ids for e in encode_fast(some, add_special_tokens=False)]),
    )
    print(f"\nbpe by encode_batch_fast: {fast:.2f} MB/s")
    if find_spec("megatron") is None:
        print("megatron-core is not installed")
        return
    theirs = size / best(options.runs, lambda: megatron_loop(lines, folder / "megatron", bpe))
    prepare([lines], folder / "out", bpe, PrepareOptions(overwrite=True))
    same = all((folder / f"megatron{s}").read_bytes() == (folder / f"out{s}").read_bytes() for s in (".bin", ".idx"))
    print(f"bpe by Megatron's loop, files written: {theirs:.2f} MB/s; the same bytes as `prepare`: {same}")
    ids = [np.frombuffer(raw, bpe.dtype) for raw in bpe.encode_raw(texts)]
    print(f"{size * 1e6 / sum(map(len, ids)):.2f} bytes a token")


if __name__ == "__main__":
    main()
