"""Shards of a real web server, which may fail, be slow, cut its answers or send other bytes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fsspec.config import conf
from fsspec.implementations.http import HTTPFileSystem

from data.index import remote
from data.index.reader import SampleReader
from data.index.remote import BlockCache
from data.index.samples import Processors
from data.index.shards import ShardChangedError, ShardFile, find_shards
from data.index.store import load_or_build_index
from data.text.chat import ChatTokenizer
from tests.data.conftest import build_index
from tests.data.file_server import FileServer, serving

CONTENT = np.random.default_rng(0).bytes(300_000)


@pytest.fixture(scope="module")
def one_server() -> Iterator[FileServer]:
    with serving() as server:
        yield server


@pytest.fixture
def server(one_server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    """A server with one file, asked without long pauses."""
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.01)
    one_server.__dict__.update(always="", token="")
    one_server.files = {"d/a-0.tar": CONTENT}
    one_server.faults.clear()
    one_server.requests.clear()
    return one_server


def test_a_read_is_one_request_for_just_its_bytes(server: FileServer):
    (shard,) = find_shards(f"{server.url}/d/a-0.tar")
    assert shard.size == len(CONTENT)
    file = ShardFile(shard)
    server.requests.clear()
    assert file.read(1000, 5000) == CONTENT[1000:6000]
    assert server.requests == [("d/a-0.tar", "bytes=1000-5999")]
    assert file.read(len(CONTENT) - 7, 100) == CONTENT[-7:]
    assert file.read(len(CONTENT), 100) == b""


@pytest.mark.parametrize("fault", ["500", "503", "429", "cut", "short", "slow"])
def test_what_passes_is_tried_again(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, fault: str
):
    monkeypatch.setattr(remote, "_TIMEOUT_SECONDS", 0.3)
    server.faults += [fault, fault]
    file = ShardFile(find_shards(f"{server.url}/d/a-0.tar")[0])
    server.faults += [fault, fault]
    assert file.read(512, 100_000) == CONTENT[512:100_512]


@pytest.mark.parametrize(
    ("fault", "reason", "tries"),
    [
        ("500", r"the server answered 500.*\(tried 5 times\)", 5),
        ("cut", r"payload is not completed.*\(tried 5 times\)", 5),
        ("slow", r"no answer in time.*\(tried 5 times\)", 5),
        ("404", "no such file", 1),
        ("403", "the server answered 403", 1),
        ("whole", "need ranged reads", 1),
        ("418", "the server answered 418", 1),
    ],
)
def test_what_does_not_pass_is_tried_five_times_or_once_and_named_with_the_url(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str, tries: int
):
    file = ShardFile(find_shards(f"{server.url}/d/a-0.tar")[0])
    monkeypatch.setattr(remote, "_TIMEOUT_SECONDS", 0.1 if fault == "slow" else 15.0)
    server.requests.clear()
    server.always = fault
    with pytest.raises(OSError, match=rf"http://.*/d/a-0\.tar: .*{reason}"):
        file.read(0, 10_000)
    assert len(server.requests) == tries


def test_a_server_that_cannot_be_reached_is_named(server: FileServer):
    with pytest.raises(ValueError, match=r"cannot be looked up: http://127\.0\.0\.1:1/a\.tar: .*"):
        find_shards("http://127.0.0.1:1/a.tar")


def test_brace_ranges_and_the_pages_of_a_web_server_name_shards(server: FileServer):
    server.files = {f"d/a-{number}.tar": b"x" * number for number in range(4)}
    found = find_shards(f"{server.url}/d/a-{{0..3}}.tar")
    assert [shard.size for shard in found] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"2 shards of .* are missing: .*a-4\.tar, .*a-5\.tar:"):
        find_shards(f"{server.url}/d/a-{{0..5}}.tar")
    server.files = {"a.tar": b"1", "b.tar": b"22", "README": b""}
    assert [shard.size for shard in find_shards(f"{server.url}/*.tar")] == [1, 2]
    with pytest.raises(ValueError, match="use a brace range"):
        find_shards(f"{server.url}/*.zip")


def test_credentials_come_from_the_settings_of_fsspec(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
):
    server.token = "Bearer secret"
    with pytest.raises(ValueError, match=r"the server answered 401"):
        find_shards(f"{server.url}/d/a-0.tar")
    monkeypatch.setitem(conf, "http", {"headers": {"Authorization": server.token}})
    assert ShardFile(find_shards(f"{server.url}/d/a-0.tar")[0]).read(0, 10) == CONTENT[:10]


@pytest.mark.parametrize("cached", [False, True])
def test_a_file_that_is_replaced_under_the_run_is_noticed(
    server: FileServer, tmp_path: Path, cached: bool
):
    cache = BlockCache(tmp_path, 2**30) if cached else None
    (shard,) = find_shards(f"{server.url}/d/a-0.tar")
    file = ShardFile(shard, cache)
    server.files["d/a-0.tar"] = bytes(len(CONTENT))
    file._check_at = 0.0  # as if two minutes had passed
    with pytest.raises(ShardChangedError, match=r"a-0\.tar has changed .*`mimo data index`"):
        file.read(0, 100)
    server.files["d/a-0.tar"] = CONTENT[:1000]
    with pytest.raises(ShardChangedError, match="it had 300000 bytes .* and has 1000"):
        file.check()
    with pytest.raises(ShardChangedError):
        ShardFile(shard, cache)


def _read_after_fork(file: ShardFile, answers: multiprocessing.SimpleQueue[bytes]) -> None:
    answers.put(file.read(100, 50))


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_an_open_shard_can_be_read_in_a_forked_process(server: FileServer):
    # A forked process waits a second for each session of its parent. Other tests have left some.
    HTTPFileSystem.clear_instance_cache()
    file = ShardFile(find_shards(f"{server.url}/d/a-0.tar")[0])
    assert file.read(100, 50) == CONTENT[100:150]
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_read_after_fork, args=(file, answers))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert answers.get() == CONTENT[100:150]
    assert file.read(100, 50) == CONTENT[100:150]


def test_an_index_and_its_samples_are_equal_wherever_the_shards_are(
    server: FileServer,
    tmp_path: Path,
    digits: Path,
    chat: ChatTokenizer,
    processors: Processors,
):
    local = build_index(str(digits / "validation-*.tar"), chat, processors)
    data = {Path(path).name: Path(path).read_bytes() for path in local.shards}
    server.files = {f"v/{name}": content for name, content in data.items()}
    # Every now and then, a request fails.
    server.faults += [fault for one in ("500", "cut", "short") for fault in ("", "", one)]
    pattern = f"{server.url}/v/{{{','.join([*data, next(iter(data))])}}}"
    index = load_or_build_index(pattern, chat, processors, cache=tmp_path)
    for name in ("json_offset", "token_length", "item_rows", "file_size"):
        np.testing.assert_array_equal(index.column(name), local.column(name))
    # A tar header is no request of its own.
    assert len(server.requests) < 20 < len(index)
    here = SampleReader(local, chat, processors)
    there = SampleReader(index, chat, processors, BlockCache(tmp_path, 2**30))
    for sample in range(0, len(index), 7):
        np.testing.assert_array_equal(here.sample(sample).input_ids, there.sample(sample).input_ids)
    np.testing.assert_array_equal(here.patches(3), there.patches(3))
    # What is indexed, and kept, is not asked for again.
    server.requests.clear()
    again = load_or_build_index(pattern, chat, processors, cache=tmp_path)
    assert [asked for _, asked in server.requests] == [""] * len(data)
    reader = SampleReader(again, chat, processors, BlockCache(tmp_path, 2**30))
    assert reader.messages(0) == here.messages(0)
    assert {asked for _, asked in server.requests} == {""}
    server.files = {name: content + bytes(512) for name, content in server.files.items()}
    with pytest.raises(ShardChangedError):
        SampleReader(index, chat, processors).messages(0)


def test_large_members_are_passed_over_when_headers_are_read(
    server: FileServer,
    tmp_path: Path,
    chat: ChatTokenizer,
    processors: Processors,
    ask,
    write_shard,
):
    members = {"a.json": ask(0), "a.bin": bytes(20 * 2**20), "b.json": ask(0)}
    server.files = {"a.tar": write_shard(tmp_path / "a.tar", members).read_bytes()}
    index = build_index(f"{server.url}/a.tar", chat, processors)
    assert [index.key(0), index.key(1)] == ["a", "b"]
    sizes = [
        int(last) - int(first) + 1
        for _, asked in server.requests
        if asked
        for first, last in [asked.removeprefix("bytes=").split("-")]
    ]
    assert sum(sizes) < 8 * 2**20
    assert len(sizes) < 12
