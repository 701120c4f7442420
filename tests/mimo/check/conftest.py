"""Runs on one rank and in transformers, done once for all tests of comparisons."""

from __future__ import annotations

import pytest

from mimo.check.parity import ParityRunner
from mimo.check.verify import Verifier
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from tests.conftest import RunRanks


@pytest.fixture(scope="session")
def verifier(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    """Shares the one-rank runs; `run_ranks` has started the fork server."""
    return Verifier(tmp_path_factory.mktemp("verify"), "fp32")


@pytest.fixture(scope="session")
def exact_verifier(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    """Verify in fp64, for models whose rounding in fp32 exceeds the tolerance."""
    return Verifier(tmp_path_factory.mktemp("verify-fp64"), "fp64")


class ParityRunners(dict[str, ParityRunner]):
    """By family, made when first used: transformers runs once for layouts with equal samples."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._tmp_path_factory = tmp_path_factory

    def __missing__(self, family: str) -> ParityRunner:
        folder = self._tmp_path_factory.mktemp(family)
        write_tiny(TinyCheckpoint(family), folder / "checkpoint")
        self[family] = ParityRunner(folder / "checkpoint", folder, timeout_seconds=120)
        return self[family]


@pytest.fixture(scope="session")
def runners(
    run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ParityRunner]:
    """Parity runners; `run_ranks` has started the fork server."""
    return ParityRunners(tmp_path_factory)
