"""Texts that several machines prepare: `phalanx data prepare` in shards, each the work of a task, then one merge. Who
runs the tasks is said elsewhere: Ray (ray_shards.py) or a job array of SLURM (slurm_shards.py)."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.index import strip_suffix
from phalanx.text.prepare import (
    BeingWritten,
    PrepareOptions,
    Summary,
    check_split,
    merge_shards,
    prepare,
    read_manifest,
)
from phalanx.text.readers import Errors, find_files
from phalanx.text.tokenizers import load_tokenizer

SHARD_BYTES = 256 << 20  # of input: what a task takes by default
MOST_SHARDS = 1000  # SLURM's arrays end there by default
PATIENCE_S = 120.0  # for the end of a process that was given up, and still holds a shard
LOOK_S = 0.5


@dataclass(frozen=True)
class ShardedTexts:
    """What is prepared: `inputs` and `tokenizer` as every machine finds them, and where the result goes.

    count    shards, of which each is a range of the input's bytes
    workers  processes of a task
    """

    inputs: tuple[str, ...]
    prefix: str
    tokenizer: str
    keys: tuple[str, ...] = ("text",)
    errors: Errors = "strict"
    append_eod: bool = True
    split: Mapping[str, float] = field(default_factory=dict)
    overwrite: bool = False
    count: int = 1
    workers: int = 1

    def shard(self, number: int) -> str:
        """The prefix of a shard's token files. They stay: the merged index names them."""
        return f"{self.prefix}.shards/{number:05d}-of-{self.count:05d}"

    @property
    def parts(self) -> tuple[str, ...]:
        """What follows the prefix in names of token files: the names of a split, or nothing."""
        return tuple(f"-{name}" for name in self.split) or ("",)


def sharded(texts: ShardedTexts, count: int | None) -> tuple[ShardedTexts, int]:
    """The same with paths that hold in any working folder, and in `count` shards (None: by the size of the input);
    and the bytes of the input. DataError for what no shard could read."""
    check_split(texts.split)
    made = load_tokenizer(texts.tokenizer)
    if texts.append_eod and made.eod is None:
        raise DataError(f"the tokenizer {made.fingerprint[:12]} has no end-of-document token")
    size = sum(file.stat().st_size for file in find_files(texts.inputs))
    absolute = ShardedTexts(
        tuple(str(Path(name).absolute()) for name in texts.inputs),
        str(Path(strip_suffix(texts.prefix)).absolute()),
        str(Path(texts.tokenizer).absolute()) if Path(texts.tokenizer).exists() else texts.tokenizer,
        texts.keys,
        texts.errors,
        texts.append_eod,
        texts.split,
        texts.overwrite,
        count or min(max(1, math.ceil(size / SHARD_BYTES)), MOST_SHARDS),
        texts.workers,
    )
    return absolute, size


def prepare_shard(texts: ShardedTexts, number: int) -> Summary:
    """One task's work. What another process did of it before it died is not done again; one that is about to die, as
    when its node was given up, is waited for."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return prepare(
                texts.inputs,
                texts.shard(number),
                load_tokenizer(texts.tokenizer),
                PrepareOptions(
                    key=texts.keys,
                    errors=texts.errors,
                    append_eod=texts.append_eod,
                    workers=texts.workers,
                    split=texts.split,
                    shard=(number, texts.count),
                    overwrite=texts.overwrite,
                ),
            )
        except BeingWritten:
            if time.monotonic() > until:
                raise
            time.sleep(LOOK_S)


def merge_all(texts: ShardedTexts) -> Summary:
    """One set of token files from those of all shards, or one for each name of a split. Returns what all of them read
    and hold."""
    notes = [read_manifest(f"{texts.shard(number)}{texts.parts[0]}") for number in range(texts.count)]
    if not any(note.get("text_bytes") for note in notes):
        raise DataError(f"no text in {', '.join(texts.inputs)}")
    found = [merge_part(texts, part) for part in texts.parts]
    whole = found[0]  # what was read is the same for each part of a split
    if texts.split:
        whole.parts = {name: [one.documents, one.tokens] for name, one in zip(texts.split, found)}
        whole.documents, whole.tokens = (sum(counts) for counts in zip(*whole.parts.values()))
        whole.lengths = dict(sum((Counter(one.lengths) for one in found), Counter()))
    return whole


def merge_part(texts: ShardedTexts, part: str) -> Summary:
    shards: Sequence[str] = [f"{texts.shard(number)}{part}" for number in range(texts.count)]
    return merge_shards(f"{texts.prefix}{part}", shards, overwrite=texts.overwrite)
