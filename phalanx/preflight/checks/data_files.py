"""Data files: every node sees the same ones, by their sizes and the hash of their headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from phalanx.config.run import Run
from phalanx.data.config import is_number
from phalanx.data.index import strip_suffix
from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView

HEADER = 1 << 20  # bytes at the beginning of each file that are hashed, and at its end


class DataFiles(NodeCheck):
    """Token files of the config, and the folder of `init_from`."""

    name = "data"
    limit_s = 20.0

    def look(self, view: NodeView, order: Any) -> dict[str, str] | None:
        return None if view.run is None else {str(path): summary(path) for path in paths_of(view.run)}

    def judge(self, looks: Looks) -> list[Finding]:
        answers = looks.of(0)
        found: dict[int, list[str]] = {}
        for path in dict.fromkeys(path for said in answers.values() for path in said):
            values = {node: said.get(path, "not in the config") for node, said in answers.items()}
            count = list(values.values())
            most = max(dict.fromkeys(count), key=lambda text: (not text.startswith("cannot"), count.count(text)))
            for node, text in values.items():
                if text != most or text.startswith("cannot"):
                    found.setdefault(node, []).append(
                        f"{path}: {text}" + ("" if text == most else f", elsewhere {most}")
                    )
        return [
            Finding(self.name, (node,), texts[0] + (f" (and {len(texts) - 1} more files)" if len(texts) > 1 else ""))
            for node, texts in found.items()
        ]


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


def summary(path: Path) -> str:
    """Size, and a hash of the file's first and last bytes."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as opened:
            total = xxhash.xxh3_64(opened.read(HEADER))
            opened.seek(max(0, size - HEADER))
            total.update(opened.read(HEADER))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"{size:,} bytes, ends {total.hexdigest()[:8]}"
