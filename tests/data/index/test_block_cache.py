"""Blocks of remote shards on a local disk: right bytes whatever happens to the folder."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data.index import block_cache
from data.index.block_cache import BlockCache

BLOCK, PART = 4096, 256
SHARDS = {f"s{number}": np.random.default_rng(number).bytes(50_000 + number) for number in range(4)}

# Decode workers are forks of processes without threads; here pytest has some.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


class Origin:
    """Where shards really are. asked: (shard, offset, size) of all that was fetched."""

    def __init__(self, cache: BlockCache, seconds: float = 0) -> None:
        self.cache, self.seconds = cache, seconds
        self.asked: list[tuple[str, int, int]] = []

    def read(self, name: str, offset: int, size: int) -> bytes:
        data = SHARDS[name]

        def fetch(begin: int, count: int) -> bytes:
            self.asked.append((name, begin, count))
            time.sleep(self.seconds)
            assert 0 <= begin < begin + count <= len(data)
            return data[begin : begin + count]

        got = self.cache.read(name, len(data), offset, size, fetch)
        assert got == data[offset : offset + size]
        return got


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "_BLOCK", BLOCK)
    monkeypatch.setattr(block_cache, "_PART", PART)


def read_everywhere(origin: Origin) -> None:
    for offset in range(0, 40_000, 1000):
        origin.read("s1", offset, 10)


def blocks(folder: Path) -> list[Path]:
    return sorted(folder.glob("blocks/??/*"))


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in blocks(folder))


def test_blocks_are_fetched_once_and_neighbours_in_one_request(tmp_path: Path):
    origin = Origin(BlockCache(tmp_path, 10**9))
    origin.read("s0", 5000, 100)
    assert origin.asked == [("s0", 4096, 4096)]
    origin.read("s0", 4096, 4096)
    assert len(origin.asked) == 1
    origin.read("s0", 0, 20_000)  # the second of five blocks is there
    assert origin.asked[1:] == [("s0", 0, 4096), ("s0", 8192, 12288)]
    origin.read("s0", 49_999, 1)  # the last block is short
    assert origin.asked[3:] == [("s0", 49152, 848)]
    again = Origin(BlockCache(tmp_path, 10**9))
    again.read("s0", 100, 19_000)
    assert again.asked == []


def test_another_version_of_a_shard_gets_no_old_blocks(tmp_path: Path):
    cache = BlockCache(tmp_path, 10**9)
    old, new = bytes(5000), bytes([1]) * 5000
    assert cache.read("url\0v1", 5000, 0, 10, lambda offset, size: old[:size]) == old[:10]
    assert cache.read("url\0v2", 5000, 0, 10, lambda offset, size: new[:size]) == new[:10]
    assert cache.read("url\0v1", 4999, 0, 10, lambda offset, size: new[:size]) == new[:10]


@pytest.mark.parametrize("limit", [0, 3 * (BLOCK + 64)])
def test_random_reads_are_right_at_any_limit_which_is_kept(tmp_path: Path, limit: int):
    origin = Origin(BlockCache(tmp_path, limit))
    draw = np.random.default_rng(0)
    for offset, size in draw.integers(1, [40_000, 10_000], (200, 2)).tolist():
        origin.read(f"s{offset % 4}", offset, size)
        assert bytes_in(tmp_path) <= limit
    assert bool(blocks(tmp_path)) == (limit > 0)


def test_the_least_recently_used_blocks_are_removed(tmp_path: Path):
    origin = Origin(BlockCache(tmp_path, 8 * (BLOCK + 64)))
    for block in range(7):
        origin.read("s0", block * BLOCK, 1)
    for block in (*range(7), 0):  # many disks note only the first time
        origin.read("s0", block * BLOCK, 1)
    origin.asked.clear()
    for block in (7, 8, 9):
        origin.read("s0", block * BLOCK, 1)
    origin.read("s0", 0, 1)  # used last
    origin.read("s0", 9 * BLOCK, 1)
    assert len(origin.asked) == 3
    origin.read("s0", BLOCK, 1)
    assert len(origin.asked) == 4


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "checksum", "empty"])
def test_a_damaged_block_is_fetched_again(tmp_path: Path, damage: str):
    origin = Origin(BlockCache(tmp_path, 10**9))
    origin.read("s0", 0, BLOCK)
    (path,) = blocks(tmp_path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[1000 if damage == "flipped" else BLOCK + 4 * (1000 // PART)] ^= 1
    kinds = {"cut": whole[:-1], "longer": whole + b"x", "empty": b""}
    path.write_bytes(kinds.get(damage, bytes(flipped)))
    origin.read("s0", 990, 20)
    assert len(origin.asked) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_disk_is_warned_of_once_and_read_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    origin = Origin(BlockCache(tmp_path, 10**9))
    origin.read("s0", 0, 10)

    def fail(path: Path, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data[:100])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.warns(UserWarning, match="the cache of shards in .* cannot be written") as warned:
        read_everywhere(origin)
    assert len(warned) == 1
    assert origin.asked[-1] == ("s1", 39_000, 10)  # no more than is needed
    origin.read("s0", 100, 10)
    assert origin.asked[-1] == ("s1", 39_000, 10)  # what is kept is used
    assert len(blocks(tmp_path)) == 1  # nothing half-written


def test_a_folder_that_cannot_be_made_is_warned_of_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    origin = Origin(BlockCache(tmp_path / "file", 10**9))
    with pytest.warns(UserWarning, match="cannot be written") as warned:
        read_everywhere(origin)
    assert len(warned) == 1


def test_what_a_crashed_process_left_is_removed_and_its_locks_are_free(tmp_path: Path):
    cache = BlockCache(tmp_path, 3 * (BLOCK + 64))
    Origin(cache).read("s0", 0, 10)
    left = blocks(tmp_path)[0].with_name(".left")
    left.write_bytes(bytes(BLOCK))
    (tmp_path / "blocks" / "used").write_text("rubbish")

    def crash() -> None:
        for name in [*(f"lock-{number:02x}" for number in range(256)), "used"]:
            file = os.open(tmp_path / "blocks" / name, os.O_RDWR | os.O_CREAT)
            fcntl.flock(file, fcntl.LOCK_EX)
        os._exit(1)

    process = multiprocessing.get_context("fork").Process(target=crash)
    process.start()
    process.join(20)
    origin = Origin(cache)
    begin = time.monotonic()
    for block in range(5):
        origin.read("s1", block * BLOCK, 10)
    assert time.monotonic() - begin < block_cache._LOCK_SECONDS / 2
    assert not left.exists()


def test_a_process_that_holds_a_lock_for_ever_only_costs_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(block_cache, "_LOCK_SECONDS", 0.02)
    origin = Origin(BlockCache(tmp_path, 10**9))
    origin.read("s0", 0, 10)
    with open(tmp_path / "blocks" / "used", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        origin.read("s1", 0, 10)
        assert len(blocks(tmp_path)) == 1
    origin.read("s1", 0, 10)
    assert len(blocks(tmp_path)) == 2


def test_threads_that_want_the_same_blocks_fetch_them_once(tmp_path: Path):
    origin = Origin(BlockCache(tmp_path, 10**9), seconds=0.05)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: origin.read("s0", n % 10, 30_000), range(64)))
    assert len(origin.asked) == 1


def test_who_comes_while_blocks_are_written_waits_for_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    replace = os.replace

    def replace_slowly(*paths: Path) -> None:
        replace(*paths)
        time.sleep(0.05)

    monkeypatch.setattr(block_cache.os, "replace", replace_slowly)
    origin = Origin(BlockCache(tmp_path, 10**9))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(origin.read, "s0", 0, 20_000)
        while not blocks(tmp_path):
            time.sleep(0.001)
        origin.read("s0", 0, 20_000)
        first.result()
    assert len(origin.asked) == 1


def test_a_lock_is_not_kept_by_a_process_that_was_forked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(block_cache, "_LOCK_SECONDS", 0.1)
    cache = BlockCache(tmp_path, 10**9)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with cache._locked("used"):
        process.start()
    with cache._locked("used") as file:
        assert file is not None
    process.kill()
    process.join()


def _work(folder: Path, limit: int, seed: int, largest: multiprocessing.SimpleQueue[int]) -> None:
    origin, most = Origin(BlockCache(folder, limit)), 0
    draw = np.random.default_rng(seed)
    for offset, size in draw.integers(1, [40_000, 9_000], (150, 2)).tolist():
        origin.read(f"s{offset % 4}", offset, size)
        with origin.cache._locked("used"):
            most = max(most, bytes_in(folder))
    largest.put(most)


def test_processes_fill_one_cache_under_a_small_limit_which_is_kept(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    largest = context.SimpleQueue()
    limit = 10 * (BLOCK + 64)
    workers = [
        context.Process(target=_work, args=(tmp_path, limit, seed, largest)) for seed in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    most = max(largest.get() for _ in workers)
    assert limit // 3 < most <= limit
    assert int((tmp_path / "blocks" / "used").read_text()) >= bytes_in(tmp_path)
