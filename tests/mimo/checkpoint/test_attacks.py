"""Files made to run code, to fill the memory or to reach other files: all are refused."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from data.text.chat import ChatTokenizer
from mimo.checkpoint.folder import read_progress
from mimo.checkpoint.hf.weights_folder import WeightsFolder
from mimo.checkpoint.manifest import listed_files
from mimo.checkpoint.reading import read
from mimo.checkpoint.resume import problems_of
from mimo.checkpoint.tensors import read_index
from mimo.errors import InputError
from mimo.families.hf_config import read_config, read_processors
from tests.mimo.checkpoint.hf.folders import make
from tests.mimo.checkpoint.manifests import small_checkpoint, write_manifest


class Attack:
    """Runs a command wherever it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch PWNED",)


PICKLE = pickle.dumps(Attack())
DEEP = b'{"format": ' + b"[" * 200_000


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make("qwen3_vl", tmp_path / "model")


def test_the_pickle_of_these_tests_runs_code() -> None:
    pickle.loads(PICKLE)
    assert Path("PWNED").exists()


@pytest.mark.parametrize("content", [PICKLE, DEEP, b"\0" * 64], ids=["pickle", "deep", "zeros"])
@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("progress.json", read_progress),
        ("tensors.json", read_index),
        ("manifest.json", listed_files),
    ],
)
def test_other_content_in_a_checkpoints_file_is_refused(
    tmp_path: Path, name: str, load: Callable[[Path], Any], content: bytes
) -> None:
    checkpoint = small_checkpoint(tmp_path / "checkpoints", 1)
    (checkpoint / name).write_bytes(content)
    if name != "manifest.json":
        write_manifest(checkpoint)
    with pytest.raises(InputError, match=rf"{name}.*damaged"):
        load(checkpoint)
    assert not Path("PWNED").exists()


def test_files_of_other_formats_and_pickles_for_tensors_are_never_loaded(tmp_path: Path) -> None:
    checkpoint = small_checkpoint(tmp_path / "checkpoints", 1)
    for name in ("common.pt", ".metadata", "pytorch_model.bin", "optimizer.pt"):
        (checkpoint / name).write_bytes(PICKLE)
    assert problems_of(checkpoint) == []
    assert read(checkpoint)["language.w"].shape == (40, 100)
    size = (checkpoint / "tensors_0.safetensors").stat().st_size
    (checkpoint / "tensors_0.safetensors").write_bytes(PICKLE.ljust(size, b"\0"))
    assert "has checksum" in problems_of(checkpoint)[0]
    write_manifest(checkpoint)
    read(checkpoint)  # numbers, whatever they are
    assert not Path("PWNED").exists()


# ------------------------------------------------------------------------- of Hugging Face


FILES = {
    "a header of 2^60 bytes": struct.pack("<Q", 2**60) + bytes(64),
    "deep": struct.pack("<Q", len(DEEP)) + DEEP,
    "a pickle": PICKLE,
    "nothing": b"",
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_a_file_of_weights_that_is_not_one_is_refused(tmp_path: Path, content: bytes) -> None:
    save_file({"w": torch.zeros(16)}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(PICKLE)
    assert WeightsFolder(tmp_path).shapes == {"w": (16,)}
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="cannot be read"):
        WeightsFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"pytorch_model.bin is a pickle"):
        WeightsFolder(tmp_path)
    assert not Path("PWNED").exists()


CODE = "open('PWNED', 'w')\nclass Evil:\n    from_pretrained = classmethod(lambda *_, **__: None)\n"
OWN_CODE: dict[str, tuple[str, dict[str, Any], Callable[[Path], Any]]] = {
    "tokenizer": (
        "tokenizer_config.json",
        {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}},
        ChatTokenizer,
    ),
    "configuration": (
        "config.json",
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}},
        read_config,
    ),
    "processor": (
        "preprocessor_config.json",
        {
            "image_processor_type": "Evil",
            "auto_map": {"AutoImageProcessor": "evil.Evil"},
        },
        read_processors,
    ),
}


@pytest.mark.parametrize("part", OWN_CODE)
def test_code_of_a_folder_is_not_run_and_no_prompt_asks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    name, content, load = OWN_CODE[part]
    known = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(known | content))
    (folder / "evil.py").write_text(CODE)
    (folder / "processor_config.json").unlink(missing_ok=True)

    def ask(*_: object) -> str:
        raise AssertionError("nobody may be asked")

    monkeypatch.setattr("builtins.input", ask)
    with suppress(ValueError):  # an InputError is one
        load(folder)
    assert not Path("PWNED").exists()
    assert not list(Path.home().glob(".cache/huggingface/modules/transformers_modules/model*"))


@pytest.mark.parametrize(
    ("name", "load"), [("config.json", read_config), ("tokenizer.json", ChatTokenizer)]
)
def test_a_deeply_nested_file_of_a_folder_is_bad_input(
    folder: Path, name: str, load: Callable[[Path], Any]
) -> None:
    (folder / name).write_bytes(DEEP)
    with pytest.raises(ValueError, match="."):
        load(folder)
