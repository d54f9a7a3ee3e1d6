"""The `data` section: which tokens the model sees, and in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.registry import lasting
from phalanx.base.tree import FromText


def words(value: Any) -> Any:
    """A string as the tuple of its words, numbers in a list as words: `0.7 a 0.3 b` and `[0.7, a, 0.3, b]` are the
    same."""
    if isinstance(value, str):
        return tuple(value.split())
    if isinstance(value, (list, tuple)):
        return tuple(repr(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else v for v in value)
    return value


Prefixes = Annotated[tuple[str, ...], FromText(words)]


def is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def prefixes_and_weights(given: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The prefixes of `a b` or of Megatron's `0.7 a 0.3 b`, and the weights before them (none in the first form)."""
    if len(given) % 2 == 0 and given and all(is_number(word) for word in given[::2]):
        return tuple(given[1::2]), tuple(float(word) for word in given[::2])
    return tuple(given), ()


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One named source of the mixture."""

    paths: Prefixes
    """Prefixes of its .bin/.idx token files, shuffled as one."""
    weight: float | None = None
    """Its share relative to the weights of the other sources."""
    tokens: int | None = None
    """Instead of a weight: how many tokens the whole run takes from it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", words(self.paths))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    paths: Prefixes = ()
    """Prefixes of .bin/.idx token files; several are blended. `0.7 a 0.3 b` also gives weights, like Megatron's
    data-path."""
    weights: tuple[float, ...] = ()
    """Blend weight of each path; unset: by number of tokens."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Instead of paths: sources by name, each with paths and a weight or a number of tokens; neither: by size."""
    text: Prefixes = ()
    """Instead of token files: text files, folders or globs, prepared into data.cache with data.tokenizer before
    training."""
    pairs: Prefixes = ()
    """Instead of token files: .jsonl files of preferences (prompt, chosen, rejected), or of queries with passages
    (query, positive, negatives) for task.name=embed: texts, or prompt_ids and so on; prepared into data.cache before
    training; or prefixes of token files prepared from them. Whole pairs are packed into sequences."""
    chats: Prefixes = ()
    """Instead of token files: files of chats (.jsonl, .parquet; patterns), prepared into data.cache before training; or
    prefixes of token files prepared from them. `0.7 a.jsonl 0.3 b.jsonl` also gives weights. Whole chats are packed
    into sequences."""
    template: str | None = None
    """Jinja file with the chat template for data.chats, which checkpoints then carry; unset: that of the tokenizer's
    folder."""
    bad_chats: Literal["stop", "skip"] = "stop"
    """Chats that cannot be trained on, such as one without an answer: stop and name them, or leave them out and count
    them."""
    too_long: Literal["stop", "cut", "drop"] = "stop"
    """Chats longer than train.seq_length: stop and name them, cut them after the last answer that fits, or drop them;
    both are counted."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of a .jsonl line or .parquet row of data.text that hold the text."""
    text_errors: Literal["strict", "replace", "skip"] = "strict"
    """Documents of data.text that are not valid text: stop the run, keep them with U+FFFD in place of invalid bytes, or
    skip them."""
    cache: str | None = None
    """Folder for the token files made of data.text, data.pairs and data.chats; unset: `data` in the run's folder."""
    split: str = "98,2,0"
    """Proportions of each corpus for train, validation and test, cut at document borders."""
    valid: dict[str, Prefixes] = field(default_factory=dict)
    """More named validation sets: name -> prefixes (or `0.7 a 0.3 b`), used whole; files of chats beside
    data.chats."""
    source: str | None = None
    """Instead of token files: samples from a class of your own, by name or PACKAGE.MODULE:NAME."""
    source_config: dict[str, Any] = field(default_factory=dict)
    """The own fields of data.source."""
    mock: bool = False
    """Mock tokens instead of files: a deterministic Markov chain that a model can learn."""
    tokenizer: str | None = None
    """A tokenizer file, a folder that holds one, `bytes` (each byte a token) or `null:N` (text of ids); it is copied
    into every checkpoint."""
    packing: Literal["off", "online", "offline"] = "off"
    """Put whole documents together into sequences and pad the rest, instead of cutting a stream of tokens into windows.
    online: packed first-fit when the run starts; offline: as stored by `phalanx data pack`."""
    document_attention: bool | None = None
    """Keep attention inside documents and restart positions at each of them. unset: yes with packing, otherwise no."""
    room: dict[str, int] = field(default_factory=dict)
    """Rows of each stream of numbers that a sequence has room for beside its tokens, such as {patches: 4096} for
    images, which the sequences of a micro-batch share, or {sound: 1500}. Models that read such a stream need it."""
    processor: str | None = None
    """A preprocessor_config.json, or a folder that holds one: how images or recordings of chats become numbers; unset:
    as the model's family does it."""
    image_workers: int = 0
    """Processes on each rank that decode images and recordings of chats ahead of need; 0: the thread that reads data
    does."""
    max_epochs: float | None = None
    """Refuse a run that would read its data more often than this; unset: no limit (for sources with a number of tokens,
    1)."""

    @property
    def inside_documents(self) -> bool:
        """Whether attention stays inside documents."""
        return self.is_packed if self.document_attention is None else self.document_attention

    @property
    def is_packed(self) -> bool:
        """Whether sequences consist of whole documents and padding."""
        return self.packing != "off" or bool(self.pairs or self.chats)

    def __post_init__(self) -> None:
        for name in ("paths", "text", "pairs", "chats"):
            object.__setattr__(self, name, words(getattr(self, name)))
        if self.source is not None:
            object.__setattr__(self, "source", lasting("source", self.source))
        object.__setattr__(self, "valid", {name: words(given) for name, given in self.valid.items()})


def prefixes_of(config: DataConfig) -> list[str]:
    """Prefixes of all token files that a run reads, each once."""
    sources = (source.paths for source in config.sources.values())
    given = (config.paths, config.pairs, config.chats, *sources, *config.valid.values())
    return list(dict.fromkeys(prefix for paths in given for prefix in prefixes_and_weights(paths)[0]))
