"""A notice that is left out is one that is named, and no other of the same library."""

from __future__ import annotations

import logging
import warnings

import pytest

NORM = "Apex is not installed. Falling back to Torch Norm"


def test_other_warnings_of_the_engine_and_the_same_words_of_others_are_shown() -> None:
    with warnings.catch_warnings(record=True) as shown:
        for message, module in (
            (NORM, "megatron.core.models.backends"),
            (NORM, "encoders.mine"),
            ("The loss is not what you think", "megatron.core.models.backends"),
        ):
            warnings.warn_explicit(message, UserWarning, "a_file.py", 1, module=module)
    assert [str(one.message) for one in shown] == [NORM, "The loss is not what you think"]


def test_other_records_of_the_same_logger_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local/cuda")
    logger.warning("Your compiler is too old")
    assert caplog.messages == ["Your compiler is too old"]
