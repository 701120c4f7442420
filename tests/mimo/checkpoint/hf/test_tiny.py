"""`mimo tiny` writes folders that transformers loads, with nothing at a special value."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from typer.testing import CliRunner

from data.text.digits import DIGITS, image_conversation, words
from mimo.checkpoint.hf.recipes import load_processor
from mimo.checkpoint.hf.tiny import TinyCheckpoint, build_tokenizer, write_tiny
from mimo.checkpoint.hf.tiny_configs import FAMILIES
from mimo.cli.main import app
from mimo.errors import InputError
from tests.mimo.checkpoint.hf import folders


@pytest.fixture(scope="module", params=folders.FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param) / "checkpoint"
    write_tiny(TinyCheckpoint(request.param), directory)
    return directory


def pictures(*sizes: tuple[int, int]) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]


def digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".json"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def question(processor: Any, num_images: int, answered: bool) -> str:
    """The text of a conversation of the digits data."""
    import random

    messages = image_conversation(list(range(num_images)), random.Random(0))
    return processor.apply_chat_template(
        messages if answered else messages[:1],
        tokenize=False,
        add_generation_prompt=not answered,
    )


def test_model_and_processor_load_and_answer_with_two_images(checkpoint: Path) -> None:
    loader: Any = AutoModelForImageTextToText
    model, report = loader.from_pretrained(
        checkpoint, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    processor = load_processor(checkpoint)
    inputs = processor(
        text=[question(processor, 2, answered=False)],
        images=[pictures((40, 60), (90, 33))],
        return_tensors="pt",
        add_special_tokens=False,
    )
    logits = model(**inputs).logits
    assert logits.shape[:2] == inputs["input_ids"].shape
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.std() < 20


def test_files_of_transformers_own_kind_give_the_same_processor(
    checkpoint: Path, tmp_path: Path
) -> None:
    """transformers 5 writes one file for all processors; published folders have several."""
    processor = load_processor(checkpoint)
    processor.tokenizer.save_pretrained(tmp_path)
    settings = processor.to_dict() | {"image_processor": processor.image_processor.to_dict()}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    again = load_processor(tmp_path)
    given = {
        "text": [question(processor, 2, answered=False)],
        "images": [pictures((40, 60), (90, 33))],
    }
    for name, values in processor(**given).items():
        np.testing.assert_array_equal(np.asarray(values), np.asarray(again(**given)[name]))


@pytest.mark.parametrize("family", folders.FAMILIES)
def test_transformers_finds_the_processor_itself(family: str, tmp_path: Path) -> None:
    if family != "gemma3":
        pytest.importorskip("torchvision", reason="transformers needs it to make this processor")
    write_tiny(TinyCheckpoint(family), tmp_path)
    found = AutoProcessor.from_pretrained(tmp_path, local_files_only=True)
    text = question(found, 2, answered=False)
    own = load_processor(tmp_path)
    assert text == question(own, 2, answered=False)
    images = [pictures((40, 60), (90, 33))]
    ids = found(text=[text], images=images)["input_ids"]
    assert list(ids[0]) == list(own(text=[text], images=images)["input_ids"][0])


def test_every_word_of_the_digits_data_is_a_token(checkpoint: Path) -> None:
    processor = load_processor(checkpoint)
    tokenizer = processor.tokenizer
    inputs = processor(
        text=[question(processor, 3, answered=True)],
        images=[pictures((30, 30), (28, 56), (56, 56))],
        add_special_tokens=False,
    )
    ids = inputs["input_ids"][0]
    assert tokenizer.decode(ids, skip_special_tokens=True).rstrip().endswith("0 1 2")
    for word in (*DIGITS, *words()):
        assert [len(tokenizer.tokenize(text)) for text in (word, f" {word}")] == [1, 1], word


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_any_text_round_trips_through_the_tokenizer(family: str) -> None:
    tokenizer = build_tokenizer(family)
    assert len(tokenizer) < 512
    for text in ("Grüße, 漢字!\n\n  def f(x):\n\treturn 0.5  ", " 🙂\u200d x\x00"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.all_special_ids)


def test_an_answer_ends_with_a_token_at_which_generation_stops(checkpoint: Path) -> None:
    processor = load_processor(checkpoint)
    text = question(processor, 1, answered=True).rstrip()  # a line break follows the end of a turn
    last = processor.tokenizer(text, add_special_tokens=False)["input_ids"][-1]
    stops = json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]
    assert last in (stops if isinstance(stops, list) else [stops])


def test_no_weight_is_at_a_special_value(checkpoint: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, local_files_only=True)
    for name, weight in model.named_parameters():
        values = weight.detach().flatten()
        assert ((values != 0) & (values != 1)).all(), name
        assert 0.02 < values.std() < 0.2, name


def test_the_embedding_has_more_rows_than_there_are_tokens(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    tokens = len(load_processor(checkpoint).tokenizer)
    assert tokens < config["text_config"]["vocab_size"]


def test_equal_seeds_give_equal_bytes_and_others_do_not(checkpoint: Path, tmp_path: Path) -> None:
    family = json.loads((checkpoint / "config.json").read_text())["model_type"]
    again, other = tmp_path / "again", tmp_path / "other"
    write_tiny(TinyCheckpoint(family), again)
    write_tiny(TinyCheckpoint(family, seed=1), other)
    assert digests(again) == digests(checkpoint)
    weights = "model.safetensors"
    assert digests(other)[weights] != digests(checkpoint)[weights]


def test_shards_and_dtype_and_ties_are_those_asked_for(tmp_path: Path) -> None:
    settings = TinyCheckpoint("qwen3_vl", dtype="bfloat16", shard_size="500KB", tied=False)
    write_tiny(settings, tmp_path / "x")
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert "lm_head.weight" in index["weight_map"]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "x", local_files_only=True)
    assert model.dtype == torch.bfloat16


def test_a_folder_that_holds_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="give an empty or a new folder"):
        write_tiny(TinyCheckpoint("gemma3"), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_tiny_checkpoint_is_replaced(tmp_path: Path) -> None:
    write_tiny(TinyCheckpoint("gemma3", shard_size="500KB"), tmp_path)
    write_tiny(TinyCheckpoint("gemma3"), tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TinyCheckpoint("qwen3vl"), "did you mean 'qwen3_vl'"),
        (TinyCheckpoint("gemma3", shard_size="many"), "shard size 'many'"),
    ],
)
def test_bad_input_is_refused_with_a_hint(
    settings: TinyCheckpoint, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        write_tiny(settings, tmp_path / "x")
    assert not any(tmp_path.iterdir())


def test_the_help_names_all_families() -> None:
    shown = " ".join(CliRunner().invoke(app, ["tiny", "--help"]).output.split())
    assert f"One of {', '.join(FAMILIES)}." in shown.replace("│ ", "").replace("│", "")
