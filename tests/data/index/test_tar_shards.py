"""What a tar file may hold besides plain files, and headers that lie."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data.index.shards import ShardFile
from data.index.tar_shards import RawSample, scan_shard


def scan(path: Path) -> dict[str, RawSample]:
    return {sample.key: sample for sample in scan_shard(str(path), {"png"})}


def add(tar: tarfile.TarFile, name: str, data: bytes = b"{}", **options: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in options.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (tarfile.SYMTYPE, "is a symbolic link"),
        (tarfile.LNKTYPE, "is a hard link"),
        (tarfile.CHRTYPE, "is a device"),
        (tarfile.FIFOTYPE, "is a pipe"),
        (tarfile.DIRTYPE, "is a folder"),
    ],
)
def test_a_member_that_is_no_file_makes_its_sample_unusable(
    tmp_path: Path, kind: bytes, reason: str
):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "good.json")
        add(tar, "bad.json")
        add(tar, "bad.0.png", b"", type=kind, linkname="/etc/passwd")
        add(tar, "link.txt", b"", type=kind, linkname="good.json")  # nobody's file
    samples = scan(tmp_path / "a.tar")
    assert samples.keys() == {"good", "bad"}
    assert samples["bad"].problem == f"bad.0.png {reason}: need the file itself"
    assert not samples["good"].problem


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_a_sparse_member_makes_its_sample_unusable(tmp_path: Path, form: str):
    if form == "pax":
        headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        headers |= {"GNU.sparse.name": "bad.0.png", "GNU.sparse.realsize": "1024"}
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            add(
                tar, "bad.0.png", b"1\n0\n512\n".ljust(512, b"\0") + bytes(512), pax_headers=headers
            )
            add(tar, "good.json")
    else:
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
            add(tar, "bad.0.png", bytes(512), type=tarfile.GNUTYPE_SPARSE)
            add(tar, "good.json")
    samples = scan(tmp_path / "a.tar")
    assert "bad.0.png is a sparse file" in samples["bad"].problem
    assert not samples["good"].problem


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_extended_headers_are_understood(tmp_path: Path, form: int):
    long = "folder/" * 40 + "näme" * 30
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        add(tar, f"{long}.json", b"12345", mtime=1.5, uname="x" * 100)
        add(tar, f"{long}.0.png", b"678")
    (sample,) = scan(tmp_path / "a.tar").values()
    assert sample.key == long
    assert sample.json is not None
    file = ShardFile(str(tmp_path / "a.tar"))
    assert file.read(sample.json.offset, sample.json.size) == b"12345"
    assert file.read(sample.items[0].offset, sample.items[0].size) == b"678"


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """A member's header with any 12 bytes for its size."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[124:136], block[156:157] = size, kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def of_size(size: int) -> bytes:
    """A size in the binary form, negative ones included."""
    sign = b"\xff" if size < 0 else b"\x80"
    return sign + (b"\xff" * 3 if size < 0 else bytes(3)) + struct.pack(">q", size)


END = bytes(1024)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header("a.json", of_size(1024)) + END, "end"),
        (header("a.json", of_size(2**62)) + END, ""),
        (header("a.json", of_size(-1)) + END, ""),
        (header("a.json", of_size(-512)) + END, ""),
        (header("long", of_size(2**40), b"L") + END, "ends after the file"),
        (header("long", of_size(-1), b"L") + END, ""),
        (header("pax", of_size(2**30), b"x") + END, "ends after the file"),
        (b"".join(header("long", of_size(0), b"L") for _ in range(3000)) + END, ""),
    ],
)
def test_headers_that_lie_about_sizes_are_damage(tmp_path: Path, content: bytes, reason: str):
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.tar is not a whole uncompressed tar .*{reason}"):
        scan(tmp_path / "a.tar")


@pytest.mark.parametrize(
    "pax",
    [
        {"size": "-512"},
        {"size": "9" * 5000},
    ],
)
def test_extended_headers_that_lie_end_the_scan(tmp_path: Path, pax: dict[str, str]):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, "a.json", b"1" * 512, pax_headers=pax)
        add(tar, "b.json", b"1" * 512)
    with pytest.raises(ValueError, match=r"a\.tar is not a whole uncompressed tar"):
        scan(tmp_path / "a.tar")


def test_random_damage_to_a_shard_raises_nothing_else(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(6):
            add(tar, f"ä{'x' * 20 * number}.json", b"{}" * 300 * number, mtime=0.5)
    whole = (tmp_path / "a.tar").read_bytes()
    draw = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in draw.integers(0, len(whole), draw.integers(1, 20)).tolist():
            damaged[place] = int(draw.integers(0, 256))
        (tmp_path / "a.tar").write_bytes(damaged[: int(draw.integers(1, len(whole)))])
        assert "is not a whole uncompressed tar" in problem(tmp_path / "a.tar")


def problem(path: Path) -> str:
    """What is wrong with a shard that may have been damaged where it does not matter."""
    try:
        scan(path)
    except ValueError as error:
        return str(error)
    return "is not a whole uncompressed tar" if tarfile.is_tarfile(path) else "not noticed"
