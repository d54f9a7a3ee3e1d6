"""Frames of sound as rows that two convolutions read, the second of which makes one row of two frames. Pure numpy; how
a recording becomes frames is up to data/sound.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FRAMES = 5
"""Frames in a row: its own two, the two before them and the one behind them, which both convolutions read (kernels of
three)."""


def frame_rows(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """frames (2 * n, bands) -> (n, FRAMES * bands): row t has frames 2t - 2 .. 2t + 2, with zeros beyond the ends."""
    count, bands = frames.shape
    padded = np.pad(frames, ((2, 1), (0, 0)))
    places = 2 * np.arange(count // 2)[:, None] + np.arange(FRAMES)
    return padded[places].reshape(count // 2, FRAMES * bands)
