"""What a layer remembers of a sequence while it is generated, as a pure value: how many bytes it takes and how it is
allocated follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PageSpec:
    """What attention remembers of each token, on this rank.

    heads   of keys and values here
    key     features of a key
    value   features of a value
    shared  the value is the first `value` features of the key (a latent is both), and takes no room of its own
    window  a token is read by itself and those less than so many tokens later, then forgotten; None: it is kept
    """

    heads: int
    key: int
    value: int
    shared: bool = False
    window: int | None = None

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token."""
        return self.heads * (self.key + (0 if self.shared else self.value)) * dtype.itemsize
