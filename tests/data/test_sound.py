"""Recordings as frames: the numbers of transformers' feature extractor to the bit, scipy's resampling, and files that
are damaged, too long or hostile."""

from __future__ import annotations

import io
import json
import struct
import sys

import numpy as np
import pytest
import scipy.signal
import soundfile
import torch
from transformers import WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from phalanx.base.errors import DataError
from phalanx.data.media import reader_of
from phalanx.data.sound import BadSound, Recordings, SoundSteps, decoded, mel_filters, read_steps, resampled, steps_of
from phalanx.models.whisper import WhisperConfig
from phalanx.sequence.frames import FRAMES, frame_rows

USUAL = {"feature_extractor_type": "WhisperFeatureExtractor"}
SIZES = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def noise(number: int, count: int, channels: int = 1) -> np.ndarray:
    found = np.random.default_rng(number).normal(0, 0.1, (count, channels)).astype(np.float32)
    return found + 0.3 * np.sin(np.arange(count) / 9)[:, None].astype(np.float32)


def file_of(sound: np.ndarray, rate: int = 16_000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(
    "changed",
    [{}, {"feature_size": 128}, {"chunk_length": 2, "hop_length": 200, "n_fft": 512}, {"sampling_rate": 24_000}],
    ids=str,
)
@pytest.mark.parametrize("seconds", [0.4, 1.9])
def test_frames_are_those_of_transformers_to_the_bit(changed, seconds):
    config = {"chunk_length": 3, **changed}
    theirs, steps = WhisperFeatureExtractor(**config), steps_of({**USUAL, **config})
    sound = noise(1, round(seconds * steps.rate))[:, 0]
    expected = theirs(sound, sampling_rate=steps.rate, return_tensors="np")["input_features"][0]
    found = steps.log_mel(sound)
    assert found.dtype == np.float32 and found.T.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_filters_are_those_of_transformers():
    for window, bands, rate in ((400, 80, 16_000), (400, 128, 16_000), (512, 40, 24_000)):
        expected = mel_filter_bank(window // 2 + 1, bands, 0.0, 8000.0, rate, norm="slaney", mel_scale="slaney")
        assert np.array_equal(mel_filters(window, bands, rate), expected.astype(np.float32))


def test_a_saved_extractor_is_read(tmp_path):
    WhisperFeatureExtractor(feature_size=128, chunk_length=20).save_pretrained(tmp_path)
    assert read_steps(tmp_path) == SoundSteps(bands=128, samples=320_000)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000, 11_025])
def test_resampling_is_scipys(rate):
    sound = noise(2, 3000)[:, 0]
    expected = scipy.signal.resample_poly(sound.astype(np.float64), 16_000, rate)
    found = resampled(sound, rate, 16_000)
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-6


def test_a_row_has_the_frames_that_both_convolutions_read():
    """Truth: the two convolutions themselves."""
    frames = torch.from_numpy(np.random.default_rng(1).normal(size=(12, 3))).float()
    first, second = torch.nn.Conv1d(3, 4, 3, padding=1), torch.nn.Conv1d(4, 4, 3, stride=2, padding=1)
    expected = second(first(frames.t()[None]))[0].t()
    rows = torch.from_numpy(frame_rows(frames.numpy())).unflatten(1, (FRAMES, 3))
    inner = torch.nn.functional.conv1d(rows.transpose(1, 2), first.weight, first.bias)
    inner[0, :, 0] = 0  # the second convolution's own padding
    found = torch.einsum("tik,oik->to", inner, second.weight) + second.bias
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kind, subtype", [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", None), ("OGG", "VORBIS")])
def test_formats_are_decoded(kind, subtype):
    sound = noise(3, 4000, channels=2)
    found, rate = decoded(file_of(sound, 22_050, kind, subtype), "a", 1.0)
    assert rate == 22_050 and found.shape == (4000,)
    if kind == "OGG":  # loses some of the noise
        assert np.corrcoef(found, sound.mean(1))[0, 1] > 0.95
    else:
        assert np.abs(found - sound.mean(1)).max() < 1e-4


def damaged() -> dict[str, tuple[bytes, str]]:
    whole = file_of(noise(4, 8000))
    endless = bytearray(whole)
    endless[40:44] = struct.pack("<I", 0xFFFFFFF0)
    nan = noise(5, 100)
    nan[50] = np.nan
    return {
        "empty": (b"", "damaged, or no recording"),
        "no sound": (b"nothing at all" * 9, "damaged, or no recording"),
        "a header alone": (whole[:20], "damaged, or no recording"),
        "no samples": (file_of(noise(1, 0)), "has no sound"),
        "too long": (file_of(noise(1, 16_001)), "has 1.0 seconds; a recording may have 1"),
        "NaN": (file_of(nan, subtype="FLOAT"), "no finite numbers"),
        "channels": (file_of(noise(1, 100, channels=9)), "has 9 channels"),
        "rate": (file_of(noise(1, 100), 400_000), "400,000 samples in a second"),
        "another format": (file_of(noise(1, 100), kind="AIFF"), "format AIFF is not read"),
        "flac cut short": (file_of(noise(1, 16_000), kind="FLAC")[:9000], "flac|cut short|damaged"),
    }


@pytest.mark.parametrize("case", damaged())
def test_damaged_and_hostile_files_are_named(case):
    data, said = damaged()[case]
    with pytest.raises(BadSound, match=f"^a.wav: .*({said})"):
        decoded(data, "a.wav", 1.0)


def test_no_bytes_make_it_raise_anything_else():
    whole = bytearray(file_of(noise(6, 3000), kind="FLAC"))
    rng = np.random.default_rng(7)
    for _ in range(60):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 4).tolist():
            data[place] = int(rng.integers(0, 256))
        try:
            decoded(bytes(data), "a.flac", 1.0)
        except BadSound as error:
            assert str(error).startswith("a.flac: ")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"feature_extractor_type": "SeamlessM4TFeatureExtractor"}, "SeamlessM4TFeatureExtractor"),
        ({"dither": 0.1}, "dither=0.1"),
        ({"do_normalize": True}, "do_normalize=True"),
        ({"hop_length": 0}, "hop_length=0"),
        ({"chunk_length": "30"}, "chunk_length='30'"),
        ({"chunk_length": 1, "hop_length": 7}, "no even number of frames"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(changed, said):
    with pytest.raises(DataError, match=said):
        steps_of({**USUAL, **changed})


def test_what_does_not_fit_the_model_is_refused(tmp_path):
    spec = WhisperConfig(**SIZES, max_source_positions=50).media
    assert reader_of(spec, None).steps.samples == 16_000
    for changed, said in (({"chunk_length": 2}, "recordings of 100 rows"), ({"feature_size": 40}, "makes 40 bands")):
        config = {**USUAL, "chunk_length": 1, **changed}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
        with pytest.raises(DataError, match=said):
            reader_of(spec, str(tmp_path))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    reader = reader_of(WhisperConfig(**SIZES).media, None)
    assert isinstance(reader, Recordings)
    with pytest.raises(DataError, match=r"soundfile.*pip install 'phalanx\[sound\]'"):
        reader.check_packages()
