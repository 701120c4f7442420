"""The checks of a machine with a GPU, tried on the CPU, and how they judge."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_speed import Stack

SMALL = Stack(1, 32, 48, 4, num_query_groups=2, head_size=8, words=20, sequences=2, steps=5)


@pytest.mark.slow
def test_jobs_and_speed_are_compared_and_written_to_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "check"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main(folder, ["fsdp"], SMALL, tests=False, gpu_needed=False) == 0
    content = json.loads((folder / "gpu_check.json").read_text())
    # The same machine twice: the losses are equal.
    assert content["checks"][0]["value"] == "largest difference of losses 0.00e+00"
    assert content["speed"]["ratio"] > 0
    page = (folder / "index.html").read_text()
    assert "transformers, sdpa" in page
    assert "kernel torch_varlen" in page


def test_losses_that_are_missing_or_no_numbers_differ() -> None:
    assert gpu.compare_losses([2.0, 1.0], [2.0, 1.0]) == 0
    assert gpu.compare_losses([2.0, 1.5], [2.0, 1.0]) == pytest.approx(1 / 3)
    assert gpu.compare_losses([2.0], [2.0, 1.0]) == math.inf
    assert gpu.compare_losses([2.0, math.nan], [2.0, 1.0]) == math.inf


def test_failed_tests_are_named_with_their_reason(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        "<testsuites><testsuite>"
        "<testcase classname='tests.a' name='good' time='1'/>"
        "<testcase classname='tests.a' name='absent' time='0'><skipped message='x'/></testcase>"
        "<testcase classname='tests.a' name='bad' time='2'>"
        "<failure message='assert 1 == 2&#10;more'>...</failure></testcase>"
        "</testsuite></testsuites>"
    )
    total, bad = gpu.read_tests(report, "exit code 1", 3.0)
    assert (total.passed, total.value) == (False, "1 passed, 1 failed, 1 skipped exit code 1")
    assert (bad.name, bad.value) == ("tests.a::bad", "assert 1 == 2")
    report.write_text("<testsuites><testsuite/></testsuites>")
    assert not gpu.read_tests(report, "", 1.0)[0].passed, "no test ran"
