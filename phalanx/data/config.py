"""The `data` section: which tokens the model sees, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    paths: tuple[str, ...] = ()
    """Prefixes of .bin/.idx token files; several are blended."""
    weights: tuple[float, ...] = ()
    """Blend weight of each path; unset: by number of tokens."""
    split: str = "98,2,0"
    """Parts of each corpus for train, validation and test, cut at document borders."""
    valid: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """More named validation sets: name -> prefixes, used whole."""
    mock: bool = False
    """Made-up tokens instead of files: a deterministic Markov chain that a model can learn."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder that holds one, or `bytes` (each byte a token); it travels into every checkpoint."""
    document_attention: bool = False
    """Keep attention inside documents and restart positions at each of them."""
    max_epochs: float | None = None
    """Refuse a run that would read its data more often than this; unset: no limit."""
