"""Texts of `data show` and `checkpoint list`."""

from __future__ import annotations

from pathlib import Path

from phalanx.base.errors import CheckpointError
from phalanx.base.rules import near_paths


def data_text(prefix: str, tokenizer: str | None, documents: int) -> str:
    from phalanx.data.index import Corpus
    from phalanx.data.tokenizers import load_tokenizer

    corpus = Corpus(prefix)
    names = load_tokenizer(tokenizer) if tokenizer else None
    lines = [repr(corpus)]
    for d in range(min(documents, corpus.num_documents)):
        start = corpus.document_start(d)
        stop = corpus.document_start(d + 1) if d + 1 < corpus.num_documents else corpus.num_tokens
        ids = corpus.tokens(start, min(stop, start + 200)).tolist()
        lines.append(f"document {d}, {stop - start} tokens: {names.decode(ids) if names else ids}")
    return "\n".join(lines)


def checkpoints_text(run: Path) -> str:
    """One line per checkpoint of a run folder (or of its checkpoints folder), oldest first."""
    from phalanx.checkpoint.keep import list_checkpoints, problem_of

    if not run.is_dir():
        near = ", ".join(near_paths(str(run)))
        raise CheckpointError(f"{run} does not exist{f'; near it: {near}' if near else ''}")
    found = list_checkpoints(run / "checkpoints") or list_checkpoints(run)
    if not found:
        return f"no checkpoint in {run / 'checkpoints'}"
    return "\n".join(f"{path}  {_size(path):.1f} MiB  {problem_of(path) or 'good'}" for path in found)


def _size(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 2**20
