"""Blocks of remote shards on a local disk: right bytes whatever happens to the folder."""

from __future__ import annotations

import errno
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from data.index import remote as block_cache
from data.index.remote import BlockCache

BLOCK = 16384
SHARDS = {f"s{number}": np.random.default_rng(number).bytes(90_000 + number) for number in range(4)}

# Decode workers are forks of processes without threads; here pytest has some.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


class Origin:
    """Where shards really are. asked: (shard, offset, size) of all that was fetched."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        self.asked: list[tuple[str, int, int]] = []

    def read(self, name: str, offset: int, size: int) -> bytes:
        data = SHARDS[name]

        def fetch(begin: int, count: int) -> bytes:
            self.asked.append((name, begin, count))
            assert 0 <= begin < begin + count <= len(data)
            return data[begin : begin + count]

        read = self.cache.read(name, len(data), offset, size, fetch)
        assert read == data[offset : offset + size]
        return read


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_BLOCK", BLOCK)


def read_everywhere(origin: Origin) -> None:
    for offset in range(0, 80_000, 4000):
        origin.read("s1", offset, 10)


def bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.glob("blocks/*"):
        with suppress(FileNotFoundError):  # removed by another process
            total += path.stat().st_size
    return total


def test_blocks_are_fetched_once_and_neighbours_in_one_request(tmp_path: Path):
    origin = Origin(BlockCache(tmp_path, 10**9))
    origin.read("s0", BLOCK + 904, 100)
    assert origin.asked == [("s0", BLOCK, BLOCK)]
    origin.read("s0", BLOCK, BLOCK)
    assert len(origin.asked) == 1
    origin.read("s0", 0, 3 * BLOCK + 1)
    assert origin.asked[1:] == [("s0", 0, 4 * BLOCK)]
    origin.read("s0", 89_999, 1)  # the last block is short
    assert origin.asked[2:] == [("s0", 5 * BLOCK, 90_000 - 5 * BLOCK)]
    again = Origin(BlockCache(tmp_path, 10**9))
    again.read("s0", 100, 3 * BLOCK)
    assert again.asked == []


def test_another_version_of_a_shard_gets_no_old_blocks(tmp_path: Path):
    cache = BlockCache(tmp_path, 10**9)
    old, new = bytes(5000), bytes([1]) * 5000
    assert cache.read("url\0v1", 5000, 0, 10, lambda offset, size: old[:size]) == old[:10]
    assert cache.read("url\0v2", 5000, 0, 10, lambda offset, size: new[:size]) == new[:10]
    assert cache.read("url\0v1", 4999, 0, 10, lambda offset, size: new[:size]) == new[:10]


@pytest.mark.parametrize("limit", [0, 12 * BLOCK])
def test_random_reads_are_right_at_any_limit_which_is_kept(tmp_path: Path, limit: int):
    origin = Origin(BlockCache(tmp_path, limit))
    draw = np.random.default_rng(0)
    for offset, size in draw.integers(1, [60_000, 30_000], (200, 2)).tolist():
        origin.read(f"s{offset % 4}", offset, size)
        assert bytes_in(tmp_path) <= limit
    assert bool(bytes_in(tmp_path)) == (limit > 0)


def test_the_least_recently_used_blocks_are_removed(tmp_path: Path):
    origin = Origin(BlockCache(tmp_path, 7 * BLOCK))
    for name in ("s0", "s1", "s2"):
        origin.read(name, 0, 2 * BLOCK)
    origin.read("s0", 0, 2 * BLOCK)
    origin.read("s3", 0, 2 * BLOCK)  # s1 makes room
    origin.asked.clear()
    origin.read("s0", 0, 2 * BLOCK)
    assert origin.asked == []
    origin.read("s1", 0, 1)
    assert len(origin.asked) == 1


@pytest.mark.parametrize("size", [0, 900])
def test_a_block_that_is_not_whole_is_fetched_again(tmp_path: Path, size: int):
    origin = Origin(BlockCache(tmp_path, 10**9))
    origin.read("s0", 0, BLOCK)
    (path,) = tmp_path.glob("blocks/*")
    os.truncate(path, size)
    origin.read("s0", 100, 20)
    assert len(origin.asked) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_disk_is_warned_of_once_and_read_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    origin = Origin(BlockCache(tmp_path, 10**9))
    origin.read("s0", 0, 10)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.warns(UserWarning, match="the cache of shards in .* cannot be written") as warned:
        read_everywhere(origin)
    assert len(warned) == 1
    assert origin.asked[-1] == ("s1", 76_000, 10)  # no more than is needed
    origin.read("s0", 100, 10)
    assert origin.asked[-1] == ("s1", 76_000, 10)  # kept blocks are used


def test_threads_that_want_the_same_blocks_read_the_right_bytes(tmp_path: Path):
    origin = Origin(BlockCache(tmp_path, 10**9))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: origin.read("s0", n % 10, 30_000), range(64)))
    assert len(origin.asked) <= 8


def _work(folder: Path, limit: int, seed: int) -> None:
    origin = Origin(BlockCache(folder, limit))
    for offset, size in np.random.default_rng(seed).integers(1, [60_000, 9_000], (150, 2)).tolist():
        origin.read(f"s{offset % 4}", offset, size)
        assert bytes_in(folder) <= limit + 6 * BLOCK


def test_processes_fill_one_cache_under_a_small_limit_which_is_kept(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    limit = 10 * BLOCK
    workers = [context.Process(target=_work, args=(tmp_path, limit, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert bytes_in(tmp_path) > limit // 3
