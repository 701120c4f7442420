"""Audio clips: from WAV files to log-mel spectrograms like Whisper's.

A clip is one file and one item. It is mixed to mono at 16 kHz, padded with silence to whole rows,
and cut into frames of 25 ms every 10 ms; a frame is a patch of one number per mel band. Source:
transformers `WhisperFeatureExtractor`, which pads every clip to 30 s.

Letters: `n` samples of the waveform at 16 kHz, `P` frames, `C` mel bands, `F` frequencies.
"""

import hashlib
import io
import math
import os
import wave
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, BinaryIO, cast

import numpy as np

from data.modalities.processor import Part, PartPlan, Size, WireForm, encoding_cost

SAMPLE_RATE = 16_000
FRAME_SAMPLES = 400
HOP_SAMPLES = 160
FRAMES_PER_TOKEN = 2  # the stride of the encoder's convolutions

_RATES = range(4_000, 96_001)
_MAX_SECONDS_DECODED = 300.0
_PADDING_SECONDS = 0.02  # of silence, between the two ends of a clip that is resampled


@dataclass(frozen=True)
class Sound:
    """A decoded file. waveform: float32 (n,) in -1..1, mono at 16 kHz. size: of the file."""

    waveform: np.ndarray
    size: Size


@dataclass(frozen=True)
class AudioClips:
    """A `Media` of WAV files. Sizes are (samples per channel, samples per second).

    num_mel_bins: C. tokens_per_row: the encoder's tokens, of two frames each, that become one row.
    max_seconds: of the longest clip that is accepted, at most 300. tower_width: hidden size of the
    tower; only `cost` depends on it.
    """

    num_mel_bins: int = 80
    tokens_per_row: int = 1
    max_seconds: float = 30.0
    tower_width: int = 384

    suffixes = ("wav",)

    def probe(self, file: BinaryIO) -> Size:
        with _opened(file) as header:
            return header.getnframes(), header.getframerate()

    def decode(self, data: bytes) -> Sound:
        with _opened(io.BytesIO(data)) as file:
            channels, width, rate, frames = file.getparams()[:4]
            raw = file.readframes(frames)
        mono = _pcm(raw, width).reshape(-1, channels).mean(axis=1)
        return Sound(resample(mono, rate).astype(np.float32), (frames, rate))

    def size_of(self, decoded: Sound) -> Size:
        return decoded.size

    def size_text(self, size: Size) -> str:
        return f"{size[0]} samples at {size[1]} Hz"

    def picture(self, decoded: Sound) -> np.ndarray:
        """Its spectrogram: time to the right, low tones at the bottom, loud is bright."""
        features = log_mel(self._whole_rows(decoded), self.num_mel_bins).T[::-1]
        grey = ((features - features.min()) * (255 / max(np.ptp(features), 1e-6))).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)

    def random_file(self, rng: np.random.Generator) -> bytes:
        length = int(rng.integers(1, 5)) * self._row_samples - int(rng.integers(0, HOP_SAMPLES))
        return wav_bytes(rng.integers(-(2**12), 2**12, length, dtype=np.int16))

    @property
    def wire(self) -> WireForm:
        return WireForm(self.num_mel_bins)

    @property
    def _row_samples(self) -> int:
        return HOP_SAMPLES * FRAMES_PER_TOKEN * self.tokens_per_row

    def plan(self, part: Part) -> PartPlan:
        """Plan an item. Raises ValueError for several files, or an empty or too long clip."""
        if part.frames != 1:
            raise ValueError(f"a part of {part.frames} files, but a clip is one file")
        samples, rate = part.size
        if not 0 < samples <= self.max_seconds * rate:
            raise ValueError(
                f"the clip lasts {samples / rate:.2f} s, needs more than 0 and at most "
                f"max_seconds, {self.max_seconds:g}; cut it, or raise max_seconds"
            )
        rows = -(-resampled_length(samples, rate) // self._row_samples)
        tokens = rows * self.tokens_per_row
        return PartPlan(
            grid=(tokens * FRAMES_PER_TOKEN, 1, 1),
            row_grid=(rows, 1, 1),
            cost=encoding_cost(tokens, self.tower_width),
        )

    def item_files(self, part: Part, item: int) -> range:
        return range(1)

    def item_patches(self, files: Sequence[Sound], part: Part, item: int) -> np.ndarray:
        """float32 (P, C): log-mel frames, padded with silence to whole rows."""
        return log_mel(self._whole_rows(files[0]), self.num_mel_bins)

    def _whole_rows(self, sound: Sound) -> np.ndarray:
        return np.pad(sound.waveform, (0, -len(sound.waveform) % self._row_samples))

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(("log-mel-1", astuple(self))).encode()).hexdigest()[:16]


def _opened(file: BinaryIO) -> wave.Wave_read:
    """An opened WAV file whose header has been read and holds nothing impossible."""
    start = file.tell()
    num_bytes = file.seek(0, os.SEEK_END) - start
    file.seek(start)
    try:
        opened = wave.Wave_read(cast(Any, file))
    except Exception as error:  # `wave` raises several types on hostile input
        raise ValueError(
            f"the audio header cannot be read ({type(error).__name__}: {error}): need a WAV file "
            "of PCM samples; convert the file or remove the sample"
        ) from error
    channels, width, rate, frames = opened.getparams()[:4]
    promised = frames * channels * width
    checks = {
        f"{channels} channels, need 1 or 2": channels not in (1, 2),
        f"{8 * width} bits a sample, need 8, 16, 24 or 32": width not in (1, 2, 3, 4),
        f"{rate} samples a second, need {_RATES[0]} to {_RATES[-1]}": rate not in _RATES,
        "no samples": frames < 1,
        f"{promised} bytes of samples by its header": promised > num_bytes,
        f"more than {_MAX_SECONDS_DECODED:g} s": frames > rate * _MAX_SECONDS_DECODED,
    }
    if any(checks.values()):
        raise ValueError(
            f"the audio file of {num_bytes} bytes has "
            f"{', '.join(text for text, is_bad in checks.items() if is_bad)}: it is corrupt, "
            "truncated or of a kind that is not taken; convert it or remove the sample"
        )
    return opened


def _pcm(raw: bytes, width: int) -> np.ndarray:
    """float64 in -1..1 from little-endian samples of ``width`` bytes; single bytes are unsigned."""
    if width == 1:
        return (np.frombuffer(raw, np.uint8).astype(np.float64) - 128) / 128
    if width == 3:  # in the upper three bytes of four
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0] / 2**31
    return np.frombuffer(raw, f"<i{width}") / 2.0 ** (8 * width - 1)


def resampled_length(samples: int, rate: int) -> int:
    """n of a clip of ``samples`` samples per channel at ``rate`` Hz."""
    return -(-samples * SAMPLE_RATE // rate)


def resample(waveform: np.ndarray, rate: int) -> np.ndarray:
    """A waveform of ``rate`` Hz at 16 kHz: its Fourier series, cut off or extended by zeros.

    The series is periodic, so the two ends of the clip are neighbours; silence keeps them apart.
    """
    if rate == SAMPLE_RATE:
        return waveform
    # A number of samples that is whole at the other rate too.
    unit = rate // math.gcd(rate, SAMPLE_RATE)
    length = -(-(len(waveform) + math.ceil(_PADDING_SECONDS * rate)) // unit) * unit
    new_length = length * SAMPLE_RATE // rate
    spectrum = np.fft.rfft(waveform, length)[: new_length // 2 + 1]
    scaled = np.fft.irfft(spectrum, new_length) * (new_length / length)
    return scaled[: resampled_length(len(waveform), rate)]


def log_mel(waveform: np.ndarray, num_mel_bins: int) -> np.ndarray:
    """float32 (P, C) of a waveform of P·160 samples: log10 of mel bands, 8 decades at most."""
    half = FRAME_SAMPLES // 2
    padded = np.pad(waveform.astype(np.float64), half, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME_SAMPLES)[::HOP_SAMPLES]
    window = np.hanning(FRAME_SAMPLES + 1)[:-1]
    power = np.abs(np.fft.rfft(frames[: len(waveform) // HOP_SAMPLES] * window)) ** 2  # (P, F)
    logs = np.log10(np.maximum(power @ mel_filters(num_mel_bins), 1e-10))
    return ((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).astype(np.float32)


@lru_cache(maxsize=8)
def mel_filters(num_mel_bins: int) -> np.ndarray:
    """float64 (F, C): triangles of equal area up to 8 kHz, evenly spaced on Slaney's scale."""
    from transformers.audio_utils import mel_filter_bank  # late: it costs seconds to import

    return mel_filter_bank(
        num_frequency_bins=FRAME_SAMPLES // 2 + 1,
        num_mel_filters=num_mel_bins,
        min_frequency=0.0,
        max_frequency=SAMPLE_RATE / 2,
        sampling_rate=SAMPLE_RATE,
        norm="slaney",
        mel_scale="slaney",
    )


def wav_bytes(samples: np.ndarray, rate: int = SAMPLE_RATE) -> bytes:
    """A mono WAV file of int16 (n,) samples."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return buffer.getvalue()
