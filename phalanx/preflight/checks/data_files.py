"""Data files: every node sees the same ones, by their sizes and the hash of their headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from phalanx.config.run import Run
from phalanx.data.config import is_number
from phalanx.data.index import strip_suffix
from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView

HEADER = 1 << 20  # bytes at the beginning of each file that are hashed, and at its end
BRIEF_HEADER, BRIEF_FILES = 1 << 16, 64  # in a run's first seconds; of more files, these lie evenly among all
NONE = ("a file", "not in the config")


class DataFiles(NodeCheck):
    """Token files of the config, and the folder of `init_from`. Files of the same place in the config are compared,
    because their names may differ between machines."""

    name = "data"
    brief = True
    limit_s = 20.0

    def look(self, view: NodeView, order: Any) -> list[list[str]] | None:
        """[path, summary] of each file."""
        if view.run is None:
            return None
        paths, header = list(paths_of(view.run)), HEADER
        if view.brief:
            paths, header = evenly(paths, BRIEF_FILES), BRIEF_HEADER
        return [[str(path), summary(path, header)] for path in paths]

    def judge(self, looks: Looks) -> list[Finding]:
        answers = looks.of(0)
        found: dict[int, list[str]] = {}
        for place in range(max(map(len, answers.values()), default=0)):
            held = {node: said[place] if place < len(said) else NONE for node, said in answers.items()}
            count = [text for _, text in held.values()]
            most = max(dict.fromkeys(count), key=lambda text: (not text.startswith("cannot"), count.count(text)))
            for node, (path, text) in held.items():
                if text != most or text.startswith("cannot"):
                    found.setdefault(node, []).append(
                        f"{path}: {text}" + ("" if text == most else f", elsewhere {most}")
                    )
        return [
            Finding(self.name, (node,), texts[0] + (f" (and {len(texts) - 1} more files)" if len(texts) > 1 else ""))
            for node, texts in found.items()
        ]


def evenly(paths: Sequence[Path], most: int) -> list[Path]:
    """All, or as many of them as `most`, the first and the last among them."""
    if len(paths) <= most:
        return list(paths)
    return [paths[i * (len(paths) - 1) // (most - 1)] for i in range(most)]


def paths_of(run: Run) -> Iterator[Path]:
    """The files that a run reads, in order, each once."""
    words = [*run.data.paths, *(word for source in run.data.sources.values() for word in source.paths)]
    words += [word for paths in run.data.valid.values() for word in paths]
    for prefix in dict.fromkeys(strip_suffix(word) for word in words if not is_number(word)):
        joined = Path(f"{prefix}.bins")  # of merged sets: the list of their .bin files
        yield joined if joined.exists() else Path(f"{prefix}.bin")
        yield Path(f"{prefix}.idx")
    for word in dict.fromkeys((*run.data.text, *run.data.pairs, *run.data.chats)):
        if not is_number(word) and not set("*?[") & set(word) and Path(word).suffix:
            yield Path(word)
    if run.init_from is not None and "://" not in run.init_from:
        yield Path(run.init_from) / "config.json"


def summary(path: Path, header: int = HEADER) -> str:
    """Size, and a hash of the file's first and last bytes."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as opened:
            total = xxhash.xxh3_64(opened.read(header))
            opened.seek(max(0, size - header))
            total.update(opened.read(header))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"{size:,} bytes, ends {total.hexdigest()[:8]}"
