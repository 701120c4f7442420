"""A synthetic index of very many samples, and a process that plans from it.

`python -m tests.data.index.plan_large FOLDER` opens the index of FOLDER and plans from it, says so,
waits for a line, and prints a JSON object of what that took.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from data.batch import plan_microbatch
from data.index.samples import Index
from data.index.shard_index import write_shard_index
from data.index.shards import find_shards
from data.index.store import index_homes, survey
from data.order import SampleOrder

SETTINGS, MEDIA = "synthetic", ("image",)
SAMPLES_PER_SHARD = 10_000
SAMPLES_PER_BLOCK = 256


def write(folder: Path, num_shards: int) -> None:
    """Shards that are nothing but a size, and their index: a sample has one image."""
    n = SAMPLES_PER_SHARD
    rng = np.random.default_rng(0)
    rows = rng.integers(1, 200, n)
    constants = {
        "json_size": 500,
        "loss_tokens": 50,
        "unknown_tokens": 0,
        "item_media": 0,
        "item_number": 0,
        "item_frames": 1,
        "item_size_0": 640,
        "item_size_1": 480,
        "item_placeholder": 3,
        "item_cost": 1,
        "file_size": 3000,
    }
    counting = {
        "item_start": np.arange(n),
        "item_file": np.arange(n),
        "key_end": np.arange(n) + 1,
        "json_offset": np.arange(n) * 4096,
        "file_offset": np.arange(n) * 4096 + 512,
    }
    columns = counting | {
        **{name: np.full(n, value) for name, value in constants.items()},
        "item_fps": np.full(n, 2.0),
        "item_rows": rows,
        "token_length": rows + 100,
        "keys": np.full(n, ord("x"), np.uint8),
    }
    (home,) = index_homes(str(folder / "*.tar"), SETTINGS, None)
    for number in range(num_shards):
        path = folder / f"{number:05}.tar"
        with path.open("wb") as file:
            file.truncate(n * 4096)  # of which the disk holds nothing
        index_file = home / f"{path.name}.index"
        write_shard_index(index_file, SETTINGS, find_shards(str(path))[0], columns, [], 0)


def open_index(folder: Path) -> Index:
    """The index; its catalog is made if there is none."""
    (home,) = index_homes(str(folder / "*.tar"), SETTINGS, None)
    found = survey(str(folder / "*.tar"), SETTINGS, MEDIA, home)
    assert not found.tasks
    return found.open()


def private_memory() -> int:
    """Bytes that no other process shares, clean ones of mapped files included."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(r"Private_\w+:\s+(\d+) kB", text)))


def main(folder: Path) -> None:
    """Open, plan, wait, and tell."""
    before, started = private_memory(), time.perf_counter()
    index = open_index(folder)
    open_seconds, opened = time.perf_counter() - started, private_memory()
    order = SampleOrder([len(index)], [1.0], 0, SAMPLES_PER_BLOCK)
    rng = np.random.default_rng(1)
    started = time.perf_counter()
    tokens = 0
    for _ in range(32):
        positions = rng.integers(0, len(index), (8, 32))
        tokens += int(plan_microbatch([index], order, list(positions)).length.sum())
    plan_seconds = time.perf_counter() - started
    print("planned", flush=True)
    sys.stdin.readline()
    result = {
        "samples": len(index),
        "tokens": tokens,
        "open_seconds": open_seconds,
        "plan_seconds": plan_seconds,
        "private_to_open": opened - before,
        "private_to_plan": private_memory() - before,
    }
    print(json.dumps(result), flush=True)
    sys.stdin.readline()  # the other one may still look at what both share


if __name__ == "__main__":
    main(Path(sys.argv[1]))
