"""Which shards a pattern names, wherever they are, and noticing that one has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.core import url_to_fs

import data.index.shards
from data.index.shards import Shard, ShardChangedError, ShardFile, find_shards, pattern_root


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """fsspec's file system in memory, empty before and after."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def put(path: str, data: bytes) -> None:
    system, name = url_to_fs(path)
    system.makedirs(name.rpartition("/")[0], exist_ok=True)
    system.pipe_file(name, data)


def names(pattern: str) -> list[str]:
    return [shard.path.rpartition("/")[2] for shard in find_shards(pattern)]


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_wildcards_and_braces_name_the_same_shards_in_a_folder_and_at_a_url(
    tmp_path: Path, memory: fsspec.AbstractFileSystem, place: str
):
    root = str(tmp_path) if place == "folder" else "memory://some/where"
    for name in ("a-8", "a-9", "a-10", "b-08", "b-09", "b-10", "b-11"):
        path = f"{root}/{name[0]}/{name}.tar"
        put(path, name.encode())
    assert names(f"{root}/a/a-{{8..10}}.tar") == ["a-10.tar", "a-8.tar", "a-9.tar"]
    assert names(f"{root}/b/b-{{08..11}}.tar") == ["b-08.tar", "b-09.tar", "b-10.tar", "b-11.tar"]
    assert names(f"{root}/b/b-{{11..08..3}}.tar") == ["b-08.tar", "b-11.tar"]
    assert names(f"{root}/{{a/a-9,b/b-{{08,1{{0..1}}}}}}.tar") == [
        *("a-9.tar", "b-08.tar", "b-10.tar", "b-11.tar")
    ]
    assert names(f"{root}/{{a,b}}/?-1*.tar") == ["a-10.tar", "b-10.tar", "b-11.tar"]
    assert names(f"{root}/**/b-1?.tar") == ["b-10.tar", "b-11.tar"]
    one = find_shards(f"{root}/*/a-10.tar")
    assert one == find_shards(f"{root}/a/a-10.tar")
    assert (one[0].path, one[0].size) == (f"{root}/a/a-10.tar", 4)
    assert ShardFile(one[0]).read(1, 100) == b"-10"


def test_a_path_that_exists_is_taken_as_it_is(tmp_path: Path):
    (tmp_path / "{a,b}[1].tar").write_bytes(b"x")
    assert names(f"{tmp_path}/{{a,b}}[1].tar") == ["{a,b}[1].tar"]


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_missing_members_of_braces_are_named(
    tmp_path: Path, memory: fsspec.AbstractFileSystem, place: str
):
    root = str(tmp_path) if place == "folder" else "memory://x"
    put(f"{root}/s-3.tar", b"x")
    with pytest.raises(ValueError, match=r"5 shards of .* are missing: .*s-1\.tar, .*s-2\.tar, .*"):
        find_shards(f"{root}/s-{{1..6}}.tar")
    with pytest.raises(ValueError, match=r"1 shards of .* are missing: .*/t\*\.tar"):
        find_shards(f"{root}/{{s,t}}*.tar")
    with pytest.raises(ValueError, match="no shard matches .*prepare the data first"):
        find_shards(f"{root}/t-{{1..6}}.tar")


def test_braces_that_stand_for_too_many_shards_are_refused():
    with pytest.raises(ValueError, match=r"stands for more than 1048576 shards"):
        find_shards("{0..999}{0..999}{0..999}.tar")


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@host/a.tar",
        "https://secret@host/a-{0..3}.tar",
        "http://host/a.tar?secret",
        "s3://key:secret@bucket/a.tar",
    ],
)
def test_a_url_with_credentials_is_refused_without_repeating_them(url: str):
    with pytest.raises(ValueError, match="may hold credentials") as error:
        find_shards(url)
    assert "secret" not in str(error.value)


def test_a_protocol_without_its_package_is_said_with_the_command():
    with pytest.raises(
        ValueError, match=r"gs://b/a.tar: a package .* is missing: pip install gcsfs"
    ):
        find_shards("gs://b/a.tar")
    with pytest.raises(ValueError, match="nosuch://b/a.tar: Protocol not known: nosuch"):
        find_shards("nosuch://b/a.tar")


@pytest.mark.parametrize(
    ("pattern", "root"),
    [
        ("a.tar", "."),
        ("/a-*.tar", "/"),
        ("d/{a,b}/*.tar", "d"),
        ("d/[ab]/a.tar", "d"),
        ("s3://bucket/d/a-{0..3}.tar", "s3://bucket/d"),
        ("memory://a-*.tar", "memory://"),
        ("http://host/d/e/a.tar", "http://host/d/e"),
    ],
)
def test_the_root_of_a_pattern_has_no_wildcards(pattern: str, root: str):
    assert pattern_root(pattern) == root


def test_a_file_that_is_written_while_it_is_open_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a.tar"
    path.write_bytes(b"before")
    (shard,) = find_shards(str(path))
    file = ShardFile(shard)
    path.write_bytes(b"behind")
    os.utime(path, ns=(0, int(shard.version) + 1))
    assert file.read(0, 2) == b"be"  # not looked at again for every sample
    with pytest.raises(ShardChangedError, match="has changed since it was indexed"):
        file.check()
    monkeypatch.setattr(data.index.shards, "_CHECK_FILE_SECONDS", 0.0)
    file = ShardFile(Shard(str(path), 6, str(int(shard.version) + 1)))
    path.write_bytes(b"longer than before")
    with pytest.raises(ShardChangedError, match=r"it had 6 bytes .* and has 18 .*mimo data index"):
        file.read(0, 2)
    with pytest.raises(ShardChangedError, match="has changed"):
        ShardFile(shard)


def test_a_file_that_became_shorter_is_noticed_at_once(tmp_path: Path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"before")
    file = ShardFile(find_shards(str(path))[0])
    path.write_bytes(b"be")
    with pytest.raises(ShardChangedError, match="it had 6 bytes"):
        file.read(0, 6)


def test_a_file_that_takes_the_place_of_an_open_one_is_noticed_when_it_is_opened(tmp_path: Path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"before")
    (shard,) = find_shards(str(path))
    file = ShardFile(shard)
    (tmp_path / "new").write_bytes(b"after!")
    os.replace(tmp_path / "new", path)
    file.check()
    assert file.read(0, 6) == b"before"
    with pytest.raises(ShardChangedError):
        ShardFile(shard)
