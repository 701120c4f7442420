"""Pieces of tensors, written in one cut and read in another."""

from __future__ import annotations

import json
import re
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
from tests.mimo.checkpoint.manifests import finish, write_manifest

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
    finish(folder, len(CUTS[cut]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saved", CUTS)
@pytest.mark.parametrize("chunk_bytes", [1 << 22, 64])  # 16 numbers: a row and a half
def test_any_cut_is_read_in_any_other_and_nothing_else_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saved: str,
    dtype: torch.dtype,
    chunk_bytes: int,
) -> None:
    for module in (tensors, reading):
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
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


def test_a_file_is_safetensors_and_whole_tensors_keep_shape_and_dtype(tmp_path: Path) -> None:
    originals = {
        "vector": torch.randn(5, dtype=torch.float64),
        "kernel": torch.randn(3, 2, 4).to(torch.bfloat16),
    }
    flat = [Piece(k, tuple(t.shape), 0, 0, t.view(len(t), -1)) for k, t in originals.items()]
    write_pieces(tmp_path, 0, flat)
    write_pieces(tmp_path, 1, [])  # a rank that owns nothing
    finish(tmp_path, 2)
    assert load_file(tmp_path / "tensors_1.safetensors") == {}
    stored = load_file(tmp_path / "tensors_0.safetensors")
    assert torch.equal(stored["kernel[0,0]"], originals["kernel"].view(3, 8))
    stored = reading.read(tmp_path)
    assert stored.keys() == originals.keys()
    for key, tensor in stored.items():
        assert tensor.dtype == originals[key].dtype
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
    for shape in ((24, 10), (12, 20)):
        problem = re.escape(f"w is [12, 10], but the model's is {list(shape)}; give the sizes")
        with pytest.raises(InputError, match=problem):
            read_pieces(tmp_path, index, [replace(whole[0], shape=shape)])
    last = tmp_path / "tensors_1.safetensors"
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"tensors_1.safetensors: the file is cut off"):
        read_pieces(tmp_path, index, whole)
    last.unlink()
    with pytest.raises(InputError, match=r"tensors_1.safetensors cannot be read"):
        read_pieces(tmp_path, index, whole)


ENTRY = {
    "shape": [12, 10],
    "dtype": "F32",
    "pieces": [["tensors_0.safetensors", 104, 0, 0, 7, 10]],
}
INDEXES: dict[str, tuple[Any, str]] = {
    "no tensors": ({}, "'tensors'"),
    "tensors in a list": ({"tensors": []}, "items"),
    "another dtype": ({"tensors": {"w": ENTRY | {"dtype": "F8"}}}, "F8"),
    "a file elsewhere": ({"tensors": {"w": ENTRY | {"pieces": [["/x", 0, 0, 0, 7, 10]]}}}, "/x"),
    "another version": ({"format": "mimo tensors 9"}, "format is 'mimo tensors 9'"),
}


@pytest.mark.parametrize(("content", "problem"), INDEXES.values(), ids=INDEXES)
def test_an_index_of_other_content_is_refused(tmp_path: Path, content: Any, problem: str) -> None:
    write_cut(tmp_path, "rows")
    index = tmp_path / "tensors.json"
    index.write_text(json.dumps({"format": "mimo tensors 1"} | content))
    with pytest.raises(InputError, match="damaged: it has checksum"):
        read_index(tmp_path)
    write_manifest(tmp_path)
    with pytest.raises(InputError, match=f"tensors.json is damaged: .*{problem}"):
        read_index(tmp_path)
    index.unlink()
    with pytest.raises(InputError, match=r"tensors.json is damaged: .*No such file"):
        read_index(tmp_path)
