"""WAV files become the log-mel frames that transformers' Whisper makes of the same sound."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np
import pytest
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

from data.index.reader import SampleReader
from data.modalities.audio import AudioClips, log_mel, mel_filters, resample, wav_bytes
from data.modalities.processor import Part
from data.text.chat import ChatTokenizer
from data.text.digits import write_tokenizer
from data.text.messages import MediaText
from tests.data.conftest import Ask, IndexOf

CLIPS = AudioClips(num_mel_bins=20, tokens_per_row=2, max_seconds=2.0)
TONE = np.sin(np.arange(16_000) * 0.3)


def wav(samples: np.ndarray, width: int = 2, channels: int = 1, rate: int = 16_000) -> bytes:
    """A file of samples in -1..1, (n,) or (n, channels)."""
    scaled = np.round(samples * (2 ** (8 * width - 1) - 1)).astype("<i8")
    raw = (scaled + (128 if width == 1 else 0)).reshape(-1, 1).view(np.uint8)[:, :width].tobytes()
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(raw)
    return buffer.getvalue()


@pytest.mark.parametrize("bands", [20, 80, 128])
def test_frames_are_those_of_transformers(bands: int) -> None:
    theirs = WhisperFeatureExtractor(feature_size=bands)
    np.testing.assert_allclose(mel_filters(bands), theirs.mel_filters, atol=1e-12)
    noise = np.random.default_rng(0).standard_normal(32_000).astype(np.float32)
    waveform = noise * 0.01 + np.tile(TONE, 2).astype(np.float32)
    expected = theirs._np_extract_fbank_features(waveform[None], "cpu")[0].T
    np.testing.assert_allclose(log_mel(waveform, bands), expected, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_of_any_width_are_read_and_channels_averaged(width: int, channels: int) -> None:
    samples = TONE * 0.5
    if channels == 2:
        samples = np.stack((samples + 0.2, samples - 0.2), axis=1)
    data = wav(samples, width, channels)
    sound = CLIPS.decode(data)
    assert CLIPS.probe(io.BytesIO(data)) == CLIPS.size_of(sound) == (16_000, 16_000)
    assert sound.waveform.dtype == np.float32
    np.testing.assert_allclose(sound.waveform, TONE * 0.5, atol=2.0 ** (2 - 8 * width) + 1e-6)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 44_101, 48_000])
def test_a_clip_of_another_rate_sounds_the_same_at_16_kilohertz(rate: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    got = resample(tone, rate)
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert len(got) == len(expected)
    np.testing.assert_allclose(got[1_000:-1_000], expected[1_000:-1_000], atol=1e-4)
    assert CLIPS.plan(Part((rate, rate))).num_rows == 25


@pytest.mark.parametrize(("samples", "rows"), [(1, 1), (640, 1), (641, 2), (32_000, 50)])
def test_rows_follow_from_the_number_of_samples_alone(samples: int, rows: int) -> None:
    data = wav(np.resize(TONE, samples))
    part = Part(CLIPS.probe(io.BytesIO(data)))
    plan = CLIPS.plan(part)
    assert (plan.num_items, plan.num_rows, plan.row_grid) == (1, rows, (rows, 1, 1))
    patches = CLIPS.item_patches([CLIPS.decode(data)], part, 0)
    assert (patches.shape, patches.dtype) == ((4 * rows, 20), np.float32)
    assert plan.grid == (len(patches), 1, 1)
    assert np.isfinite(patches).all()


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (Part((32_001, 16_000)), r"lasts 2\.00 s, needs more than 0 and at most max_seconds, 2"),
        (Part((0, 16_000)), r"the clip lasts 0\.00 s"),
        (Part((16_000, 16_000), frames=2), "a part of 2 files, but a clip is one file"),
    ],
)
def test_parts_that_cannot_be_taken_are_refused(part: Part, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        CLIPS.plan(part)


GOOD = wav(TONE)


def header(at: int, form: str, value: int) -> bytes:
    """The good file with a number of its header replaced."""
    size = struct.calcsize(form)
    return GOOD[:at] + struct.pack(form, value) + GOOD[at + size :]


HOSTILE = {
    "empty": (b"", "the audio header cannot be read"),
    "noise": (b"\x89PNG" * 40, "the audio header cannot be read"),
    "half a header": (GOOD[:30], "the audio header cannot be read"),
    "not PCM": (header(20, "<H", 85), "the audio header cannot be read"),
    "no channel": (header(22, "<H", 0), "the audio header cannot be read|has 0 channels"),
    "9 channels": (header(22, "<H", 9), "9 channels, need 1 or 2"),
    "no rate": (header(24, "<I", 0), "0 samples a second, need 4000 to 96000"),
    "4 GHz": (header(24, "<I", 4_000_000_000), "4000000000 samples a second"),
    "64 bits": (header(34, "<H", 64), "64 bits a sample, need 8, 16, 24 or 32"),
    "4 GB": (header(40, "<I", 2**32 - 2), "4294967294 bytes of samples by its header"),
    "truncated": (GOOD[:-500], "32000 bytes of samples by its header"),
    "no samples": (wav(np.zeros(0)), "no samples"),
    "too long": (wav(np.zeros(4_000 * 301), 1, rate=4_000), "more than 300 s"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused_with_a_reason_before_any_sample_is_read(kind: str) -> None:
    data, problem = HOSTILE[kind]
    with pytest.raises(ValueError, match=problem):
        CLIPS.probe(io.BytesIO(data))
    with pytest.raises(ValueError, match=problem):
        CLIPS.decode(data)


def test_random_files_are_small_clips_of_several_sizes() -> None:
    rng = np.random.default_rng(0)
    sizes = [CLIPS.probe(io.BytesIO(CLIPS.random_file(rng))) for _ in range(40)]
    assert {CLIPS.plan(Part(size)).num_rows for size in sizes} == {1, 2, 3, 4}


def test_a_picture_shows_the_loud_tone_of_a_clip() -> None:
    picture = CLIPS.picture(CLIPS.decode(GOOD))
    assert (picture.dtype, picture.shape) == (np.uint8, (20, 100, 3))
    band = int(CLIPS.item_patches([CLIPS.decode(GOOD)], Part((16_000, 16_000)), 0)[50].argmax())
    assert picture[19 - band, 50].tolist() == [255] * 3 or picture[19 - band, 50, 0] > 250


def test_the_index_names_the_file_at_fault_and_reads_the_others(
    tmp_path, index_of: IndexOf, ask: Ask
) -> None:
    write_tokenizer(tmp_path / "tokenizer", {"audio": "<|audio_pad|>"})
    chat = ChatTokenizer(tmp_path / "tokenizer", {"audio": MediaText("<|audio_pad|>")})
    index = index_of(
        {
            "good.json": ask(1).replace(b'"image"', b'"audio"'),
            "good.0.wav": GOOD,
            "cut.json": ask(1).replace(b'"image"', b'"audio"'),
            "cut.0.WAV": GOOD[:-500],
        },
        chat,
        {"audio": CLIPS},
    )
    assert [*map(index.key, range(len(index)))] == ["good"]
    (skipped,) = index.skipped_samples()
    assert (skipped.key, skipped.reason[:33]) == ("cut", "item 0: the audio file of 31544 b")
    reader = SampleReader(index, chat, {"audio": CLIPS})
    assert reader.patches(0).shape == (100, 20)
    assert (reader.sample(0).input_ids == chat.placeholder_ids["audio"]).sum() == 25
    assert wav_bytes(np.zeros(3, np.int16))[:4] == b"RIFF"
