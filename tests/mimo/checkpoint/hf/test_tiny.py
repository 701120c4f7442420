"""`mimo tiny` writes folders that transformers loads, without defaults or special values.

A default would hide that an importer overlooks a setting: one of transformers, which a reader of
the files might fall back to, or of our settings, which stands if the importer does not set it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedConfig,
)

from data.modalities.transformers import load_processor
from data.text.digits import DIGITS, words
from examples.digits.conversations import image_conversation
from mimo.checkpoint.hf.architectures import ARCHITECTURES
from mimo.checkpoint.hf.tiny import TinyCheckpoint, build_tokenizer, write_tiny
from mimo.errors import InputError
from mimo.families.hf_config import read_config, read_processors
from tests.mimo.checkpoint.hf import folders


@pytest.fixture(scope="module", params=folders.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.make(family, tmp_path_factory.mktemp(family) / "checkpoint")


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


def test_files_written_by_transformers_give_the_same_processor(
    checkpoint: Path, tmp_path: Path
) -> None:
    """transformers 5 writes one file for all processors; published folders have several."""
    processor = load_processor(checkpoint)
    processor.tokenizer.save_pretrained(tmp_path)
    settings = processor.to_dict() | {"image_processor": processor.image_processor.to_dict()}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    again = load_processor(tmp_path)
    inputs = {
        "text": [question(processor, 2, answered=False)],
        "images": [pictures((40, 60), (90, 33))],
    }
    for name, values in processor(**inputs).items():
        np.testing.assert_array_equal(np.asarray(values), np.asarray(again(**inputs)[name]))


def test_auto_processor_loads_the_folder(family: str, checkpoint: Path) -> None:
    auto = AutoProcessor.from_pretrained(checkpoint, local_files_only=True)
    text = question(auto, 2, answered=False)
    ours = load_processor(checkpoint)
    assert text == question(ours, 2, answered=False)
    images = [pictures((40, 60), (90, 33))]
    ids = auto(text=[text], images=images)["input_ids"]
    assert list(ids[0]) == list(ours(text=[text], images=images)["input_ids"][0])


def test_every_word_of_the_digits_data_is_a_token(family: str, checkpoint: Path) -> None:
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
        # Qwen3.5's tokenizer never joins a digit to the space before it.
        joined = 2 if family == "qwen3_5" and word in DIGITS else 1
        assert [len(tokenizer.tokenize(text)) for text in (word, f" {word}")] == [1, joined], word
    config = json.loads((checkpoint / "config.json").read_text())
    assert len(tokenizer) < config["text_config"]["vocab_size"], "the embedding has more rows"


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_any_text_round_trips_through_the_tokenizer(family: str) -> None:
    tokenizer = build_tokenizer(family)
    assert len(tokenizer) < 512
    for text in ("Grüße, 漢字!\n\n  def f(x):\n\treturn 0.5  ", " 🙂\u200d x\x00"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & set(tokenizer.all_special_ids)


def test_answers_end_with_a_stop_token(checkpoint: Path) -> None:
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


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"])
def test_equal_seeds_give_equal_bytes_and_others_do_not(family: str, tmp_path: Path) -> None:
    made = [folders.make(family, tmp_path / str(i), seed=i // 2) for i in range(3)]
    first, again, other = map(digests, made)
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]


def test_options_set_shards_dtype_and_ties(tmp_path: Path) -> None:
    settings = TinyCheckpoint("qwen3_vl", dtype="bfloat16", shard_size="500KB", tied=False)
    write_tiny(settings, tmp_path / "x")
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert "lm_head.weight" in index["weight_map"]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "x", local_files_only=True)
    assert model.dtype == torch.bfloat16
    write_tiny(TinyCheckpoint("qwen3_vl"), tmp_path / "x")
    assert not (tmp_path / "x" / "model.safetensors.index.json").exists(), "it is replaced"


def test_a_folder_that_holds_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="give an empty or a new folder"):
        write_tiny(TinyCheckpoint("gemma3"), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_unknown_family_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'qwen3_vl'"):
        write_tiny(TinyCheckpoint("qwen3vl"), tmp_path / "x")
    assert not any(tmp_path.iterdir())


# Of transformers, what may be equal to a default: there is one value only that we compute, and
# others are refused.
ONE_VALUE = {
    *("hidden_act", "hidden_activation", "in_channels", "num_channels", "attention_bias"),
    *("attention_dropout", "use_sliding_window", "use_bidirectional_attention"),
    *("attn_logit_softcapping", "final_logit_softcapping", "model_type", "rope_type"),
    *("do_convert_rgb", "do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample"),
    "image_processor_type",
}
# What the weights, the tokenizer or nothing else in training depends on.
NOT_IMPORTED = {
    *PreTrainedConfig().to_dict(),
    *("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "_sliding_window_pattern"),
    *("sliding_window of qwen2_5_vl", "max_window_layers of qwen2_5_vl"),  # it has no windows
}
# Of ours, what no file says of these checkpoints: a padding that is our own, an epsilon that
# transformers has in its code, how fast files are decoded, and what transformers would not read.
UNSAID = {
    "qwen2_5_vl": {
        *("vocab_multiple", "jpeg_draft", "video_min_pixels", "video_max_pixels", "norm_eps")
    },
    "qwen3_vl": {"vocab_multiple", "jpeg_draft", "norm_eps"},
    "qwen3_5": {"vocab_multiple", "jpeg_draft", "norm_eps", "deepstack_visual_indexes"},
    "gemma3": {
        *("vocab_multiple", "jpeg_draft", "pan_and_scan", "pan_and_scan_min_crop_size"),
        *("pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate"),
    },
}


def unseen(family: str, folder: Path) -> set[tuple[str, str]]:
    """Settings as (module, key) that are the default of ours, or are left to it."""
    architecture, config = ARCHITECTURES[family], read_config(folder)
    language: Any = architecture.language_family()
    tower: Any = architecture.encoder_family()
    imported = {
        "language": (language, language.settings_from_hf(config)),
        "vision": (tower, tower.settings_from_hf(config, read_processors(folder))),
    }
    defaults = set()
    for module, (kind, imported_settings) in imported.items():
        settings = kind.Settings(**imported_settings).model_dump()
        for key, field in kind.Settings.model_fields.items():
            is_listed = module == "vision" or key == "vocab_multiple"
            if is_listed and key in UNSAID[family]:
                continue
            if not field.is_required() and settings[key] == field.default:
                defaults.add((module, key))
    return defaults


def test_every_imported_setting_differs_from_our_default(family: str, checkpoint: Path) -> None:
    assert unseen(family, checkpoint) == set()


def test_every_value_differs_from_the_default_of_transformers(
    family: str, checkpoint: Path
) -> None:
    config: Any = AutoConfig.from_pretrained(checkpoint)
    processor: Any = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")
    equal = set()
    for part in (config, config.text_config, config.vision_config, processor):
        default = dict(leaves(type(part)().to_dict()))
        for keys, value in leaves(part.to_dict()):
            if keys in default and default[keys] == value:
                equal.add(keys[-1])
    allowed = ONE_VALUE | NOT_IMPORTED
    allowed |= {key.partition(" ")[0] for key in allowed if key.endswith(f" of {family}")}
    assert equal <= allowed, equal - allowed


def leaves(values: Mapping[Any, Any], above: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every value that is no mapping, with its keys; sections of their own left out."""
    for key, value in values.items():
        if key in ("text_config", "vision_config", *NOT_IMPORTED):
            continue
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value
