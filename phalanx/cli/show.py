"""Texts of `data prepare`, `data show` and `checkpoint list`."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from phalanx.base.errors import CheckpointError, DataError
from phalanx.cli.progress import decimal_bytes

if TYPE_CHECKING:
    from phalanx.config.run import Run
    from phalanx.data.index import Corpus
    from phalanx.data.loader import Loader
    from phalanx.text.prepare import Summary
    from phalanx.text.tokenizer_base import Tokenizer


MANY = 100_000  # documents examined for lengths and duplicates ...
LONG = 200_000_000  # ... as long as they hold at most so many tokens


def is_config(what: str) -> bool:
    """Whether it is a config file or the folder of a run; anything else is the prefix of token files."""
    return what.endswith((".yaml", ".yml", ".py")) or (Path(what) / "config.yaml").exists()


def data_text(prefix: str, tokenizer: str | None, documents: int, start: int = 0) -> str:
    """The contents of a pair of token files: counts, lengths, duplicates, and some documents."""
    from phalanx.data.index import Corpus
    from phalanx.text.tokenizers import load_tokenizer

    corpus = Corpus(prefix)
    names = load_tokenizer(tokenizer) if tokenizer else None
    lines = [repr(corpus), *_checksums(corpus), *_other_tokenizer(prefix, names), *_glance(corpus)]
    for d in range(start, min(start + documents, corpus.num_documents)):
        first, stop = corpus.document_start(d), corpus.document_start(d + 1)
        ids = corpus.tokens(first, min(stop, first + 200)).tolist()
        more = " ..." if stop - first > 200 else ""
        lines.append(
            f"tokens {first}..{stop - 1}: document {d}, {stop - first} tokens: "
            f"{names.decode(ids) if names else ids}{more}"
        )
    return "\n".join(lines)


def _checksums(corpus: Corpus) -> list[str]:
    from phalanx.data.classes import SUFFIX

    lacking = [str(file.path) for file in corpus.bin_files if file.segments is None]
    classes = corpus.prefix + SUFFIX  # those of an earlier version have none
    lacking += [classes] if SUFFIX not in corpus.beside and os.path.exists(classes) else []
    return [f"unchecked: there are no checksums of {', '.join(lacking)}"] if lacking else []


def prepared_text(summary: Summary, prefix: str, seconds: float | None) -> Iterator[str]:
    """What `data prepare` wrote, a line for each set of token files, and what it skipped. seconds: None if it already
    existed."""
    from phalanx.data.index import strip_suffix

    if summary.parts:
        for name, (documents, tokens) in summary.parts.items():
            yield files_text(documents, tokens, f"{strip_suffix(prefix)}-{name}")
    text = decimal_bytes(summary.text_bytes)
    how = (
        "there already, of the same inputs and settings"
        if seconds is None
        else f"{seconds:.1f} s, {_speed(summary.text_bytes, seconds)}"
    )
    if summary.parts:
        yield f"{text} of text; {how}"
    else:
        yield files_text(
            summary.documents, summary.tokens, prefix, f" ({text})", f" in {how}" if seconds is not None else f"; {how}"
        )
    for reason, count in summary.skipped_by.items():
        yield f"skipped: {count:,} ({reason})"
    if summary.empty:
        yield f"left out: {summary.empty:,} without text"
    if summary.replaced:
        yield f"bad bytes replaced in {summary.replaced:,}"


def files_text(documents: int, tokens: int, prefix: str, size: str = "", how: str = "") -> str:
    """`19 documents, 77,681 tokens -> data/own.bin`, or .idx where the tokens stay in the files that were merged."""
    from phalanx.data.index import strip_suffix

    prefix = strip_suffix(prefix)
    suffix = ".bin" if os.path.exists(f"{prefix}.bin") else ".idx"
    return f"{documents:,} document{'s' * (documents != 1)}, {tokens:,} tokens{size} -> {prefix}{suffix}{how}"


def _speed(size: int, seconds: float) -> str:
    return f"{decimal_bytes(size / max(seconds, 1e-3))}/s"


def data_prefixes(what: str, overrides: tuple[str, ...]) -> list[str]:
    """The token files that a config (or a run's folder) reads."""
    from phalanx.base.errors import Problem
    from phalanx.cli.setup import prepare_elsewhere
    from phalanx.data.check import check_files
    from phalanx.data.config import prefixes_of
    from phalanx.forecast.check import raise_problems
    from phalanx.nn.objective import make_objective
    from phalanx.text.cache import ChatUse, find_text

    run = prepare_elsewhere(what, overrides, None).run
    problems = check_files(run.data)
    use = ChatUse(make_objective(run.task).train_on, run.model.media)
    data = None if problems else find_text(run.data, run.dir, use)
    if data is None and not problems:
        rule = (
            "is not prepared yet: there are no token files to compare; `phalanx train` and `phalanx data "
            "show CONFIG` prepare it"
        )
        name = next(name for name in ("pairs", "chats", "text") if getattr(run.data, name))
        problems = [Problem(f"data.{name}", list(getattr(run.data, name)), rule)]
    raise_problems(problems)
    return prefixes_of(data or run.data)


def verify_text(prefixes: Sequence[str]) -> Iterator[str]:
    """Compare token files with their checksums; a line about each. DataError, at the end, if any are damaged."""
    from phalanx.data.index import Corpus, strip_suffix

    damaged = []
    for prefix in dict.fromkeys(map(strip_suffix, prefixes)):
        try:
            found, lines = _compared(Corpus(prefix))
        except DataError as error:
            found, lines = [str(error)], list[str]()
        damaged += [prefix] if found else []
        yield from (*found, *lines)
    if damaged:
        raise DataError(f"{', '.join(damaged)}: damaged; restore the files from a copy, or prepare the texts again")


def _compared(corpus: Corpus) -> tuple[list[str], list[str]]:
    """(what is damaged, other remarks) for token files whose .idx is good."""
    from phalanx.cli.progress import decimal_bytes, progress
    from phalanx.data.checksums import compare

    files = [file for file in corpus.checked_files if file.segments is not None]
    total = sum(file.size for file in files)
    with progress(corpus.prefix) as show:
        found = compare(files, min(4, os.cpu_count() or 1), lambda done: show(done, total))
    lines = _checksums(corpus)
    if files and not found:
        lines.append(
            f"{corpus.prefix}: good: {corpus.num_tokens:,} tokens, {decimal_bytes(total)} compared with checksums"
        )
    return found, lines


def _other_tokenizer(prefix: str, tokenizer: Tokenizer | None) -> list[str]:
    """A warning if decoding these tokens would not give the original text."""
    from phalanx.text.prepare import check_tokenizer

    try:
        if tokenizer is not None:
            check_tokenizer(prefix, tokenizer)
    except DataError as error:
        return [f"warning: {error}"]
    return []


def _glance(corpus: Corpus) -> list[str]:
    """Lengths and exact duplicates of the first documents."""
    lengths: list[int] = []
    places: dict[bytes, list[int]] = defaultdict(list)
    for d in range(min(corpus.num_documents, MANY)):
        start, stop = corpus.document_start(d), corpus.document_start(d + 1)
        if stop > LONG and lengths:
            break
        places[hashlib.blake2b(corpus.tokens(start, stop).tobytes(), digest_size=16).digest()].append(d)
        lengths.append(stop - start)
    if not lengths:
        return []
    seen = (
        "all documents"
        if len(lengths) == corpus.num_documents
        else f"the first {len(lengths):,} of {corpus.num_documents:,} documents"
    )
    duplicates = [found for found in places.values() if len(found) > 1]
    lines = [
        f"tokens per document, {seen}: min {min(lengths):,}, median {int(median(lengths)):,}, max "
        f"{max(lengths):,}, empty {lengths.count(0):,}"
    ]
    copies = sum(len(found) - 1 for found in duplicates)
    lines.append(f"duplicates, {seen}: {copies:,} repeat an earlier one token for token ({copies / len(lengths):.1%})")
    for found in sorted(duplicates, key=len, reverse=True)[:3]:
        shown = ", ".join([*map(str, found[:5]), *(["..."] if len(found) > 5 else [])])
        lines.append(f"  {len(found):,} times, {lengths[found[0]]:,} tokens: documents {shown}")
    return lines


def run_data_text(
    config: str,
    overrides: tuple[str, ...],
    *,
    step: int | None,
    ranks: int | None,
    rank: int | None,
    tokenizer: str | None,
) -> str:
    """For a config: the table of its sources or, given a step, the tokens that make it up (on all ranks, or on one)."""
    from phalanx.base.errors import Problem
    from phalanx.cli.setup import prepare_elsewhere
    from phalanx.data.check import check_files
    from phalanx.forecast.check import raise_problems
    from phalanx.forecast.data_table import data_table, step_data, step_text
    from phalanx.planning.plan import grid_of
    from phalanx.text.tokenizers import load_tokenizer

    ready = prepare_elsewhere(config, overrides, ranks)
    run, grid, wrong = ready.run, grid_of(ready.run, ready.ranks), []
    if step is not None and not 1 <= step <= run.train.last_step:
        wrong.append(
            Problem(
                "--step",
                step,
                "must be a step of the run",
                {"train.steps": run.train.last_step},
                (1, run.train.last_step),
            )
        )
    if rank is not None and not 0 <= rank < grid.world:
        wrong.append(Problem("--rank", rank, "must be one of the ranks", {"--ranks": grid.world}, (0, grid.world - 1)))
    raise_problems([*wrong, *check_files(run.data)])
    loader, valid = prepared_loaders(run)
    if step is None:
        return data_table(run, loader, valid)
    names = tokenizer or run.data.tokenizer
    which = None if rank is None else [grid.coords(rank).dp]
    return step_text(
        run, step_data(run, loader, step, grid.dp, which), grid.dp, load_tokenizer(names) if names else None
    )


def prepared_loaders(run: Run) -> tuple[Loader, dict[str, Loader]]:
    """The loaders of training and of validation sets; texts are prepared first, as training does."""
    from phalanx.cli.progress import progress
    from phalanx.forecast.data_table import open_loaders
    from phalanx.nn.objective import make_objective
    from phalanx.text.cache import ChatUse, use_text
    from phalanx.text.prepare import check_tokenizers

    with progress("prepare") as show:
        data = use_text(
            run.data,
            run.dir,
            run.model.vocab_size,
            train_on=ChatUse(make_objective(run.task).train_on, run.model.media),
            say=lambda text: click.echo(text, err=True),
            progress=show,
        )
    check_tokenizers(data)
    return open_loaders(run, data)


def samples_text(config: str, overrides: tuple[str, ...], count: int, tokenizer: str | None) -> str:
    """Documents in the order of training, with what of them is trained. In colour on a terminal."""
    from phalanx.cli.setup import prepare_elsewhere
    from phalanx.data.check import check_files
    from phalanx.forecast.check import raise_problems
    from phalanx.forecast.sample_text import document_lines, documents_of
    from phalanx.text.tokenizers import load_tokenizer

    run = prepare_elsewhere(config, overrides, None).run
    raise_problems(check_files(run.data))
    loader, _ = prepared_loaders(run)
    names = tokenizer or run.data.tokenizer
    words = load_tokenizer(names) if names else None
    width, colour = shutil.get_terminal_size().columns, sys.stdout.isatty()
    shown = islice(documents_of(loader, 0), count)
    return "\n\n".join("\n".join(document_lines(document, words, width, colour)) for document in shown)


def pack_text(config: str, overrides: tuple[str, ...]) -> Iterator[str]:
    """Store a packing of each part of each corpus that a config reads; a line about each."""
    from phalanx.cli.progress import progress
    from phalanx.cli.setup import prepare_elsewhere
    from phalanx.data.check import check_files
    from phalanx.data.packing import make_packing, packing_path, write_packing
    from phalanx.data.sources import corpus_parts
    from phalanx.forecast.check import raise_problems
    from phalanx.nn.objective import make_objective
    from phalanx.planning.reading import window_length
    from phalanx.text.cache import ChatUse, use_text

    run = prepare_elsewhere(config, (*overrides, "data.packing=offline"), None).run
    raise_problems(check_files(run.data))
    with progress("prepare") as show:
        data = use_text(
            run.data,
            run.dir,
            run.model.vocab_size,
            train_on=ChatUse(make_objective(run.task).train_on, run.model.media),
            say=lambda text: click.echo(text, err=True),
            progress=show,
        )
    length = window_length(replace(run, data=data))
    for corpus, start, stop in corpus_parts(data, valid=run.train.eval_interval is not None):
        packing = make_packing(corpus, start, stop, length, decreasing=True)
        path = packing_path(corpus.prefix, start, stop, length)
        write_packing(path, packing, corpus, start, stop)
        yield f"{path}: {packing.text}"


def checkpoints_text(run: str) -> str:
    """One line per checkpoint of a run folder (or of its checkpoints folder), oldest first."""
    from phalanx.checkpoint.keep import ignored, list_checkpoints, pin_of, problem_of
    from phalanx.checkpoint.places import missing, place

    folder = place(run)
    if not folder.is_dir():
        raise CheckpointError(missing(folder))
    found = list_checkpoints(folder / "checkpoints") or list_checkpoints(folder)
    notes = ignored(folder)
    if not found:
        return "\n".join([f"no checkpoint in {folder / 'checkpoints'}", *notes])
    lines = [f"{path}  {_size(path):.1f} MiB  {problem_of(path) or 'good'}" for path in found]
    return "\n".join(
        [*(line + ("  pinned" if pin_of(path).exists() else "") for line, path in zip(lines, found)), *notes]
    )


def _size(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 2**20
