"""Clips of synthetic spoken digits to write down: no recordings, no download.

Each digit glides from one of four vowels to another; a vowel is two resonances of a voice. A clip
has one to four digits of one voice at 8 kHz, with pauses and noise. The splits share no voice.
Some samples are text only, in whole runs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.modalities.audio import wav_bytes
from data.text.digits import conversation, write_tokenizer
from examples.digits.conversations import spaced, text_conversation
from examples.digits.scans import Draw, write_data_set

FORMAT_VERSION = 1
PLACEHOLDERS = {"audio": "<|audio_pad|>"}
_RATE = 8_000
_NUM_VOICES = {"train": 200, "validation": 20, "test": 40}
_QUESTIONS = ("what digits are these ?", "read the digits in order .", "write the digits .")

# Resonances in hertz of i, e, a and u, from the lower one up.
_VOWELS = ((300.0, 2300.0), (550.0, 1700.0), (800.0, 1200.0), (350.0, 750.0))
_GLIDES = tuple(itertools.permutations(_VOWELS, 2))[:10]  # by digit
_BANDWIDTHS = (90.0, 130.0)
_HIGHEST_HARMONIC = 3_400.0
_CONTROL = 40  # samples between two points of a glide


@dataclass(frozen=True)
class Voice:
    """A speaker. pitch: hertz. size: factor on the resonances. tempo: factor on the speed."""

    pitch: float
    size: float
    tempo: float

    @classmethod
    def draw(cls, rng: random.Random) -> Voice:
        """Draw a random voice."""
        return cls(rng.uniform(90, 220), rng.uniform(0.9, 1.1), rng.uniform(0.85, 1.25))


def prepare_spoken_digits(
    directory: str | Path,
    num_train: int = 12000,
    num_validation: int = 200,
    num_test: int = 300,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write train-*.tar, validation-*.tar, test-*.tar and tokenizer/, as `prepare_digits` does."""
    counts = {"train": num_train, "validation": num_validation, "test": num_test}
    settings = {"kind": "spoken_digits", "version": FORMAT_VERSION, "seed": seed, **counts}

    def drawing(split: str) -> Draw:
        numbers = range(_NUM_VOICES[split])
        voices = [Voice.draw(random.Random(f"voice/{seed}/{split}/{n}")) for n in numbers]

        def draw(rng: random.Random, text_only: bool) -> tuple[dict[str, bytes], dict[str, Any]]:
            if text_only:
                return {}, {"messages": text_conversation(rng)}
            digits = [rng.randrange(10) for _ in range(rng.randrange(1, 5))]
            clip = wav_bytes(speak(digits, rng.choice(voices), rng), _RATE)
            messages = conversation(["audio"], rng.choice(_QUESTIONS), spaced(digits))
            return {"0.wav": clip}, {"messages": messages}

        return draw

    tokenizer = partial(write_tokenizer, placeholders=PLACEHOLDERS)
    return write_data_set(directory, "spoken", seed, settings, counts, drawing, tokenizer, progress)


def speak(digits: Sequence[int], voice: Voice, rng: random.Random) -> np.ndarray:
    """Return int16 (n,) at 8 kHz: the digits with pauses between them, and noise."""
    parts = [_pause(rng)]
    for digit in digits:
        parts += [_glide(digit, voice, rng), _pause(rng)]
    clip = np.concatenate(parts)
    noise = np.random.default_rng(rng.getrandbits(64)).standard_normal(len(clip))
    clip = clip * rng.uniform(0.3, 0.9) + noise * rng.uniform(0.002, 0.02)
    return np.round(np.clip(clip, -1, 1) * (2**15 - 1)).astype(np.int16)


def _pause(rng: random.Random) -> np.ndarray:
    return np.zeros(int(_RATE * rng.uniform(0.06, 0.14)))


def _glide(digit: int, voice: Voice, rng: random.Random) -> np.ndarray:
    """Return (n,), at most 1: harmonics of the pitch, shaped by the moving resonances."""
    seconds = rng.uniform(0.22, 0.32) / voice.tempo
    length = int(_RATE * seconds) // _CONTROL * _CONTROL
    pitch = voice.pitch * rng.uniform(0.95, 1.05)
    harmonics = pitch * np.arange(1, int(_HIGHEST_HARMONIC / pitch) + 1)[:, None]  # (K, 1)
    points = np.arange(length // _CONTROL + 1) / (length // _CONTROL)
    glide = np.clip((points - 0.25) / 0.5, 0, 1)  # first vowel, transition, second vowel
    loudness = np.zeros((len(harmonics), len(points)))
    for first, last, width in zip(*_GLIDES[digit], _BANDWIDTHS, strict=True):
        centre = voice.size * (first + (last - first) * glide)
        loudness += np.exp(-0.5 * ((harmonics - centre) / width) ** 2)
    loudness *= np.sin(np.pi * np.clip(points, 0.02, 0.98)) ** 0.5
    time = np.arange(length)
    control = np.arange(len(points)) * _CONTROL
    waves = np.sin(2 * np.pi * harmonics * time / _RATE)
    sound = np.zeros(length)
    for volume, wave in zip(loudness, waves, strict=True):
        sound += np.interp(time, control, volume) * wave
    return sound / max(float(np.abs(sound).max()), 1e-6)
