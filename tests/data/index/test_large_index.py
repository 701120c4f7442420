"""Opening and planning from a very large index takes little memory of each process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.index import plan_large

MB = 2**20


def plan_in_two_processes(folder: Path) -> list[dict[str, Any]]:
    """What `plan_large` tells, of two that hold what they have mapped at the same time."""
    command = [sys.executable, "-m", "tests.data.index.plan_large", str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    two = [subprocess.Popen(command, **pipes) for _ in range(2)]  # pyright: ignore
    results = []
    try:
        for process in two:
            assert process.stdout is not None
            assert process.stdout.readline() == "planned\n"
        for process in two:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            results.append(json.loads(process.stdout.readline()))
    finally:
        for process in two:
            process.communicate("\n")
    return results


@pytest.mark.parametrize(
    "num_shards", [100, pytest.param(2000, marks=pytest.mark.slow)], ids=["1M", "20M"]
)
def test_processes_that_plan_from_a_large_index_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    plan_large.write(tmp_path, num_shards)
    index = plan_large.open_index(tmp_path)
    assert len(index) == index.num_items == num_shards * plan_large.SAMPLES_PER_SHARD
    on_disk = sum(path.stat().st_size for path in index.catalog.path.parent.iterdir())
    assert on_disk < 4.5 * len(index)  # bytes: rows, tokens (2), a letter of the key
    one, other = plan_in_two_processes(tmp_path)
    print(json.dumps([one, other], indent=1))
    assert one["samples"] == other["samples"] == len(index)
    assert one["tokens"] == other["tokens"] > 0
    for result in (one, other):
        assert result["private_to_open"] < 20 * MB
        assert result["private_to_plan"] < 20 * MB
