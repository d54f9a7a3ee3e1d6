"""Recordings of chats (data/media.py): decoded with soundfile, and turned into log-mel frames as a
preprocessor_config.json says (Whisper's feature extractor), two of which an encoder reads as a row.

    bytes ──decoded──▶ (n,) samples ──resampled──▶ (n,) at the rate ──log_mel──▶ (frames, bands) ──frame_rows──▶ rows

Files may come from anybody: which formats are read, how long a recording may be and how many channels it may have is
decided here; a file that breaks a rule is a BadSound, which names it.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.media import BadMedia, MediaReader
from phalanx.sequence.frames import FRAMES, frame_rows
from phalanx.sequence.media import MediaSpec
from phalanx.sequence.sample import Units

CONFIG = "preprocessor_config.json"
EXTRACTOR = "WhisperFeatureExtractor"
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3")
MAX_CHANNELS = 8
MAX_RATE = 192_000
HIGHEST = 8_000.0  # Hz, of the bands
RANGE = 8.0  # decades below the loudest band that are kept
ZERO_CROSSINGS, KAISER = 10, 5.0  # of the filter that resamples
OUTPUTS = 8192  # that are resampled at once


class BadSound(BadMedia):
    """A recording that is not read: damaged, hostile, or of a kind that cannot be used."""


# ---- preprocessor_config.json


@dataclass(frozen=True)
class SoundSteps:
    """What becomes of a recording.

    rate     samples in a second, to which it is resampled
    samples  its length, to which it is padded with silence
    window   samples of a window of the Fourier transform; hop: from one to the next
    bands    of the mel scale
    """

    rate: int = 16_000
    samples: int = 480_000
    window: int = 400
    hop: int = 160
    bands: int = 80

    @property
    def frames(self) -> int:
        return self.samples // self.hop

    @property
    def seconds(self) -> float:
        return self.samples / self.rate

    def log_mel(self, sound: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n,) samples at the rate, at most `samples` -> (frames, bands): logarithms of the power in each band, as far
        as RANGE decades below the loudest. The same operations as transformers', so the same bits."""
        padded = torch.from_numpy(np.pad(sound, (0, self.samples - len(sound))))
        window = torch.hann_window(self.window)
        power = torch.stft(padded, self.window, self.hop, window=window, return_complex=True)[..., :-1].abs() ** 2
        mel = torch.from_numpy(mel_filters(self.window, self.bands, self.rate)).T @ power.contiguous()
        logs = mel.clamp(min=1e-10).log10()
        logs = torch.maximum(logs, logs.max() - RANGE)
        found: NDArray[np.float32] = ((logs + 4.0) / 4.0).T.contiguous().numpy()
        return found


@lru_cache(maxsize=8)
def mel_filters(window: int, bands: int, rate: int) -> NDArray[np.float32]:
    """(window // 2 + 1, bands): triangles on the mel scale of Slaney's "Auditory toolbox" (1998), of one area each,
    from 0 to HIGHEST Hz."""
    corners = _hertz(np.linspace(0.0, _mels(HIGHEST), bands + 2))
    frequencies = np.linspace(0, rate // 2, window // 2 + 1)
    slopes = corners[None, :] - frequencies[:, None]
    widths = np.diff(corners)
    falling, rising = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    triangles = np.maximum(0.0, np.minimum(falling, rising))
    found: NDArray[np.float32] = (triangles * (2.0 / (corners[2:] - corners[:-2]))).astype(np.float32)
    return found


# linear up to 1,000 Hz, which is 15 mels, then logarithmic: 27 mels for a factor of 6.4
def _mels(hertz: float) -> float:
    return 3.0 * hertz / 200.0 if hertz < 1000.0 else 15.0 + np.log(hertz / 1000.0) * (27.0 / np.log(6.4))


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.where(
        mels < 15.0, 200.0 * mels / 3.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mels - 15.0))
    )
    return found


# key -> the values that are computed, where others are not
ONLY: dict[str, tuple[Any, ...]] = {
    "dither": (0, 0.0),
    "do_normalize": (False,),
    "padding_side": ("right",),
    "padding_value": (0, 0.0),
}


def steps_of(config: dict[str, Any], where: str = CONFIG) -> SoundSteps:
    """As transformers 5 reads it. DataError names all that is not supported."""
    kind = config.get("feature_extractor_type")
    if kind != EXTRACTOR:
        raise DataError(f"{where}: feature_extractor_type={kind!r} is not supported ({EXTRACTOR})")
    odd = [
        f"{key}={config[key]!r} (supported: {good[0]!r})"
        for key, good in ONLY.items()
        if config.get(key) is not None and config[key] not in good
    ]
    found = dict[str, int]()
    for key, usual in {"feature_size": 80, "sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}.items():
        value = usual if config.get(key) is None else config[key]
        if type(value) is not int or value < 1:
            odd.append(f"{key}={value!r} (an integer, at least 1)")
            value = usual
        found[key] = value
    seconds = 30 if config.get("chunk_length") is None else config["chunk_length"]
    if type(seconds) not in (int, float) or not 0 < seconds <= 3600:
        odd.append(f"chunk_length={seconds!r} (seconds, at most an hour)")
    if odd:
        raise DataError(f"{where}: not supported: {'; '.join(odd)}")
    rate = found["sampling_rate"]
    steps = SoundSteps(rate, round(seconds * rate), found["n_fft"], found["hop_length"], found["feature_size"])
    if steps.samples % steps.hop or steps.frames % 2 or steps.samples <= steps.window // 2:
        raise DataError(f"{where}: {steps.samples:,} samples of a recording make no even number of frames")
    return steps


def read_steps(path: Path) -> SoundSteps:
    """The preprocessor_config.json of a folder, or at this path. DataError says what is not supported."""
    file = path / CONFIG if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{file}: no such file: it says how recordings become numbers") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{file}: not a JSON object")
    return steps_of(found, str(file))


# ---- recordings


def decoded(data: bytes, name: str, most: float) -> tuple[NDArray[np.float32], int]:
    """(n,) samples, the mean of all channels, and how many there are in a second. BadSound if the file is damaged,
    empty, longer than `most` seconds, or of a kind that is not read; `name` for messages."""
    import soundfile  # an optional package

    try:
        with soundfile.SoundFile(BytesIO(data)) as file:
            _check_header(file, name)
            # what a header says of the length may be wrong: no more is decoded than a recording may have
            limit = math.floor(most * file.samplerate)
            found = file.read(limit + 1, dtype="float32", always_2d=True)
            announced, rate = len(file), file.samplerate
    except (soundfile.SoundFileError, RuntimeError, ValueError, OSError, MemoryError) as error:
        raise BadSound(f"{name}: damaged, or no recording of a format that is read: {error}") from error
    if len(found) > limit:
        seconds = f"{max(announced, len(found)) / rate:.1f}"
        raise BadSound(f"{name}: has {seconds} seconds; a recording may have {most:g}: cut it, with its text")
    if not len(found):
        raise BadSound(f"{name}: has no sound")
    if len(found) < announced:
        raise BadSound(f"{name}: cut short: {len(found):,} of {announced:,} samples")
    if not np.isfinite(found).all():
        raise BadSound(f"{name}: has samples that are no finite numbers")
    return found.mean(1, dtype=np.float32), rate


def _check_header(file: Any, name: str) -> None:
    if file.format not in FORMATS:
        raise BadSound(f"{name}: format {file.format} is not read ({', '.join(FORMATS)})")
    if not 1 <= file.channels <= MAX_CHANNELS:
        raise BadSound(f"{name}: has {file.channels} channels; a recording may have {MAX_CHANNELS}")
    if not 1000 <= file.samplerate <= MAX_RATE:
        raise BadSound(f"{name}: has {file.samplerate:,} samples in a second; 1,000 to {MAX_RATE:,} are read")


def resampled(sound: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """(n,) samples at another rate: a low-pass filter (a sinc in Kaiser's window) is evaluated where the new samples
    are."""
    if rate == wanted:
        return sound
    up, down = wanted // math.gcd(rate, wanted), rate // math.gcd(rate, wanted)
    half = ZERO_CROSSINGS * max(up, down)
    taps = _low_pass(half, 1.0 / max(up, down)) * up
    each = -(-len(taps) // up)  # of the old samples that a new one is made of
    phases = np.zeros(each * up)
    phases[: len(taps)] = taps
    phases = phases.reshape(each, up).T[:, ::-1]
    padded = np.pad(sound.astype(np.float64), (each - 1, half // up + each))
    windows = np.lib.stride_tricks.sliding_window_view(padded, each)
    found = np.empty(-(-len(sound) * up // down), np.float32)
    for first in range(0, len(found), OUTPUTS):
        at = np.arange(first, min(first + OUTPUTS, len(found))) * down + half
        found[first : first + OUTPUTS] = (windows[at // up] * phases[at % up]).sum(1)
    return found


@lru_cache(maxsize=8)
def _low_pass(half: int, cutoff: float) -> NDArray[np.float64]:
    """(2 * half + 1,) that sum to one; cutoff: a part of half the rate."""
    places = np.arange(-half, half + 1)
    found: NDArray[np.float64] = cutoff * np.sinc(cutoff * places) * np.kaiser(2 * half + 1, KAISER)
    return found / found.sum()


# ---- rows


@dataclass(frozen=True)
class Recordings(MediaReader):
    """Reads recordings as `spec` and `steps` say. All have the same number of rows: silence fills the rest."""

    article = "a recording"
    plural = "recordings"
    spec: MediaSpec
    steps: SoundSteps

    @classmethod
    def made(cls, spec: MediaSpec, processor: str | None) -> Recordings:
        steps = steps_of(dict(spec.processor)) if processor is None else read_steps(Path(processor))
        stream, where = spec.stream, f"data.processor={processor}"
        if (rows := steps.frames // 2) != stream.largest:
            raise DataError(f"{where}: makes recordings of {rows:,} rows, and the model reads {stream.largest:,}")
        if FRAMES * steps.bands != stream.width:
            raise DataError(f"{where}: makes {steps.bands} bands, and the model reads {stream.width // FRAMES}")
        return Recordings(spec, steps)

    def check_packages(self) -> None:
        try:
            import soundfile  # noqa: F401 - an optional package
        except (ImportError, OSError) as error:
            raise DataError(
                f"recordings are decoded by the package soundfile, which cannot be imported ({error}): "
                "pip install 'phalanx[sound]'"
            ) from error

    def sizes(self, data: bytes, name: str) -> tuple[int, int]:
        decoded(data, name, self.steps.seconds)
        return self.spec.stream.largest, 0

    def units(self, data: bytes, name: str, where: str) -> Units:
        sound, rate = decoded(data, name, self.steps.seconds)
        at_rate = resampled(sound, rate, self.steps.rate)[: self.steps.samples]
        seconds = len(sound) / rate
        return self._unit(self.steps.log_mel(at_rate), f"{name} ({seconds:.2f} seconds) of {where}")

    def mock(self, number: int, rng: np.random.Generator) -> Units:
        frames = rng.standard_normal((2 * self.spec.stream.largest, self.spec.stream.width // FRAMES))
        return self._unit(frames.astype(np.float32), f"made-up recording {number}")

    def _unit(self, frames: NDArray[np.float32], name: str) -> Units:
        rows = frame_rows(frames)
        return Units(rows, np.empty((len(rows), 0), np.int64), (len(rows),), np.arange(len(rows)), 1, (name,))
