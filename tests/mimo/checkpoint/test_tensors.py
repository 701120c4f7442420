"""Pieces of tensors, written in one cut and read in another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mimo.checkpoint import reading, tensors
from mimo.checkpoint.reading import read_pieces
from mimo.checkpoint.tensors import read_index, write_index, write_pieces
from mimo.engines.contract import Piece
from mimo.errors import InputError

ROWS, COLUMNS = 12, 10
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)

# By rank, rectangles as (row, column, rows, columns).
CUTS = {
    "whole": [[(0, 0, 12, 10)]],
    "rows": [[(0, 0, 7, 10)], [(7, 0, 5, 10)]],
    "columns": [[(0, 0, 12, 4)], [(0, 4, 12, 6)]],
    # The second half of a stack of two matrices, and stretches that begin within a row.
    "stacked": [[(0, 0, 3, 10), (6, 0, 3, 10)], [(3, 0, 3, 10), (9, 0, 3, 10)]],
    "stretches": [
        [(0, 0, 4, 10), (4, 0, 1, 3)],
        [(4, 3, 1, 7), (5, 0, 2, 10), (7, 0, 1, 9)],
        [(7, 9, 1, 1), (8, 0, 4, 10)],
    ],
    "columns in stretches": [
        [(0, 0, 5, 5), (5, 0, 1, 2)],
        [(5, 2, 1, 3), (6, 0, 6, 5)],
        [(0, 5, 12, 5)],
    ],
}


def pieces(place: list[tuple[int, int, int, int]], values: Tensor) -> list[Piece]:
    return [
        Piece("w", tuple(WHOLE.shape), r, c, values[r : r + height, c : c + width])
        for r, c, height, width in place
    ]


def write_cut(folder: Path, cut: str) -> None:
    for rank, place in enumerate(CUTS[cut]):
        write_pieces(folder, rank, pieces(place, WHOLE))
    write_index(folder, len(CUTS[cut]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saved", CUTS)
def test_any_cut_is_read_in_any_other_and_nothing_else_is_read(
    tmp_path: Path, saved: str, dtype: torch.dtype
) -> None:
    write_cut(tmp_path, saved)
    for wanted in CUTS.values():
        for place in wanted:
            result = torch.full_like(WHOLE, -1, dtype=dtype)
            wanted_pieces = pieces(place, result)
            num_bytes = read_pieces(tmp_path, read_index(tmp_path), wanted_pieces)
            assert num_bytes == sum(piece.values.numel() for piece in wanted_pieces) * 4
            expected = torch.full_like(result, -1)
            for piece in pieces(place, expected):
                rows, columns = piece.values.shape
                top, first = piece.row, piece.column
                piece.values.copy_(WHOLE[top : top + rows, first : first + columns])
            assert torch.equal(result, expected)


def test_pieces_larger_than_a_chunk_are_read_in_any_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tensors, reading):
        monkeypatch.setattr(module, "_CHUNK_BYTES", 64)  # 16 numbers: a row and a half
    for saved in CUTS:
        folder = tmp_path / saved
        folder.mkdir()
        write_cut(folder, saved)
        for place in (place for cut in CUTS.values() for place in cut):
            result = torch.zeros_like(WHOLE)
            read_pieces(folder, read_index(folder), pieces(place, result))
            is_wanted = torch.zeros_like(WHOLE, dtype=torch.bool)
            for piece in pieces(place, is_wanted):
                piece.values.fill_(True)
            assert torch.equal(result, torch.where(is_wanted, WHOLE, 0))


def test_a_file_is_safetensors_and_whole_tensors_keep_shape_and_dtype(tmp_path: Path) -> None:
    originals = {
        "vector": torch.randn(5, dtype=torch.float64),
        "kernel": torch.randn(3, 2, 4).to(torch.bfloat16),
    }
    flat = [Piece(k, tuple(t.shape), 0, 0, t.view(len(t), -1)) for k, t in originals.items()]
    write_pieces(tmp_path, 0, flat)
    write_pieces(tmp_path, 1, [])  # a rank that owns nothing
    write_index(tmp_path, 2)
    assert load_file(tmp_path / "tensors_1.safetensors") == {}
    stored = load_file(tmp_path / "tensors_0.safetensors")
    assert torch.equal(stored["kernel[0,0]"], originals["kernel"].view(3, 8))
    described = reading.describe(tmp_path)
    assert described == {k: (t.shape, t.dtype) for k, t in originals.items()}
    for key, tensor in reading.read(tmp_path, described).items():
        assert torch.equal(tensor, originals[key])


@pytest.mark.parametrize(
    "places",
    [
        [(0, 0, 6, 10)],
        [(0, 0, 6, 10), (5, 0, 7, 10)],
        [(0, 0, 6, 10), (6, 0, 6, 5)],
        # As many elements as the whole has, but some twice and some not at all.
        [(0, 0, 6, 10), (6, 0, 3, 10), (6, 0, 3, 10)],
        [(0, 0, 12, 5), (0, 4, 12, 5)],
    ],
)
def test_pieces_that_do_not_cover_a_tensor_are_refused_when_written(
    tmp_path: Path, places: list[tuple[int, int, int, int]]
) -> None:
    for rank, place in enumerate(places):
        write_pieces(tmp_path, rank, pieces([place], WHOLE))
    with pytest.raises(AssertionError, match="w: rows"):
        write_index(tmp_path, len(places))


def test_without_the_file_of_every_rank_there_is_no_index(tmp_path: Path) -> None:
    for rank, key in enumerate("ab"):  # either file alone covers what it names
        write_pieces(tmp_path, rank, [Piece(key, (12, 10), 0, 0, WHOLE)])
    (tmp_path / "tensors_1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"tensors_1\.safetensors"):
        write_index(tmp_path, 2)
    assert not (tmp_path / "tensors.json").exists()


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    write_cut(tmp_path, "rows")
    index = read_index(tmp_path)
    whole = pieces([(0, 0, 12, 10)], WHOLE.clone())
    with pytest.raises(InputError, match="has no tensor other; resume with the recipe"):
        read_pieces(tmp_path, index, [replace(whole[0], key="other")])
    with pytest.raises(InputError, match=r"w has 12 rows, but the model has 24; .*vocab_multiple"):
        read_pieces(tmp_path, index, [replace(whole[0], shape=(24, 10))])
    with pytest.raises(InputError, match=r"w is \[12, 10\], but the model's is \[12, 20\]"):
        read_pieces(tmp_path, index, [replace(whole[0], shape=(12, 20))])
    last = tmp_path / "tensors_1.safetensors"
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"tensors_1.safetensors: the file is cut off"):
        read_pieces(tmp_path, index, whole)
    with pytest.raises(
        InputError, match=r"tensors_1.safetensors has \d+ bytes, not \d+.*copy it again"
    ):
        read_index(tmp_path)
    last.unlink()
    with pytest.raises(InputError, match=r"tensors_1.safetensors cannot be read"):
        read_pieces(tmp_path, index, whole)
    with pytest.raises(InputError, match=r"No such file.*tensors_1.safetensors.*copy it again"):
        read_index(tmp_path)


def damaged(**changes: Any) -> str:
    """An index of the cut "rows", with changes to the entry of its tensor."""
    pieces = [
        ["tensors_0.safetensors", 104, 0, 0, 7, 10],
        ["tensors_1.safetensors", 104, 7, 0, 5, 10],
    ]
    entry = {"shape": [12, 10], "dtype": "F32", "pieces": pieces} | changes
    return json.dumps({"format": "mimo tensors 1", "tensors": {"w": entry}})


FIRST = ["tensors_0.safetensors", 104, 0, 0, 7, 10]
INDEXES = {
    "cut off": damaged()[:-9],
    "no text": "\udcff",
    "a list": "[]",
    "no tensors": '{"format": "mimo tensors 1"}',
    "tensors in a list": '{"format": "mimo tensors 1", "tensors": []}',
    "another dtype": damaged(dtype="F8"),
    "no pieces": damaged(pieces=[]),
    "a piece missing": damaged(pieces=[FIRST]),
    "a piece twice": damaged(pieces=[FIRST, FIRST]),
    "a short piece": damaged(pieces=[FIRST[:-1]]),
    "a piece that is a number": damaged(pieces=[3]),
    "no dimension": damaged(shape=[]),
    "an empty dimension": damaged(shape=[0, 10], pieces=[]),
    "a shape of text": damaged(shape="ab"),
    "more rows than the file": damaged(pieces=[["tensors_0.safetensors", 104, 0, 0, 12, 10]]),
    "more numbers than memory": damaged(
        shape=[10**9, 10**6], pieces=[["tensors_0.safetensors", 104, 0, 0, 10**9, 10**6]]
    ),
    "a negative row": damaged(shape=[6, 10], pieces=[["tensors_0.safetensors", 104, -1, 0, 7, 10]]),
    "a file elsewhere": damaged(pieces=[["../tensors_0.safetensors", *FIRST[1:]]]),
    "an absolute name": damaged(pieces=[["/etc/passwd", *FIRST[1:]]]),
    "an offset of 2^63": damaged(pieces=[["tensors_0.safetensors", 2**63, 0, 0, 12, 10]]),
    "a file that is a number": damaged(pieces=[[0, *FIRST[1:]]]),
}


@pytest.mark.parametrize("text", INDEXES.values(), ids=INDEXES)
def test_a_damaged_index_is_refused_before_anything_is_read(tmp_path: Path, text: str) -> None:
    write_cut(tmp_path, "rows")
    (tmp_path / "tensors.json").write_text(damaged())
    assert read_index(tmp_path)["w"].shape == (12, 10), "without changes it is a good one"
    (tmp_path / "tensors.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match="damaged.*copy it again"):
        read_index(tmp_path)


def test_a_missing_index_and_one_of_another_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tensors.json is missing"):
        read_index(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(InputError, match=r"former version.*mimo convert to-hf"):
        read_index(tmp_path)
    (tmp_path / "tensors.json").write_text(json.dumps({"format": "mimo tensors 9"}))
    with pytest.raises(InputError, match=r"format 'mimo tensors 9'"):
        read_index(tmp_path)
