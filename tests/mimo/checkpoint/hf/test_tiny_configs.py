"""No value of a tiny checkpoint is a default, so that one which is overlooked is seen.

A default of transformers, which a reader of the files might fall back to, or of our settings, which
stands where the importer says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig

from mimo.checkpoint.hf.architectures import ARCHITECTURES
from mimo.families.hf_config import read_config, read_processors
from tests.mimo.checkpoint.hf import folders

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
        "vocab_multiple",
        "jpeg_draft",
        "video_min_pixels",
        "video_max_pixels",
        "norm_eps",
    },
    "qwen3_vl": {"vocab_multiple", "jpeg_draft", "norm_eps"},
    "gemma3": {
        *("vocab_multiple", "jpeg_draft", "pan_and_scan", "pan_and_scan_min_crop_size"),
        *("pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate"),
    },
}
# What was overlooked unseen once: the module it belongs to, and families that have it.
ONCE_BLIND = {
    "image_mean": ("vision", folders.FAMILIES),
    "image_std": ("vision", folders.FAMILIES),
    "rotary_base": ("vision", ("qwen2_5_vl", "qwen3_vl")),
    "norm_eps": ("language", folders.FAMILIES),
    "local_rotary_base": ("language", ("gemma3",)),
    "tokens_per_second": ("vision", ("qwen2_5_vl",)),
}


@pytest.fixture(scope="module", params=folders.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.make(family, tmp_path_factory.mktemp(family) / "model")


Import = Callable[[], dict[str, Any]]


def unseen(family: str, folder: Path, overlooked: frozenset[tuple[str, str]] = frozenset()) -> set:
    """Settings as (module, key) that are the default of ours, or are left to it.

    overlooked: the same of those that a broken importer leaves out.
    """
    architecture, config = ARCHITECTURES[family], read_config(folder)
    language: Any = architecture.language_family()
    tower: Any = architecture.encoder_family()
    imported = {
        "language": (language, language.settings_from_hf(config)),
        "vision": (tower, tower.settings_from_hf(config, read_processors(folder))),
    }
    found = set()
    for module, (kind, said) in imported.items():
        given = {key: value for key, value in said.items() if (module, key) not in overlooked}
        settings = kind.Settings(**given).model_dump()
        for key, field in kind.Settings.model_fields.items():
            own = module == "vision" or key == "vocab_multiple"
            if own and key in UNSAID[family]:
                continue
            if not field.is_required() and settings[key] == field.default:
                found.add((module, key))
    return found


def test_every_setting_that_is_imported_differs_from_ours_when_nothing_is_said(
    family: str, folder: Path
) -> None:
    assert unseen(family, folder) == set()


def test_a_setting_that_the_importer_overlooks_is_seen(family: str, folder: Path) -> None:
    """Each of those that once were not, and all of them at once."""
    every = {(module, key) for key, (module, own) in ONCE_BLIND.items() if family in own}
    for overlooked in ({one} for one in every):
        assert unseen(family, folder, frozenset(overlooked)) == overlooked
    assert unseen(family, folder, frozenset(every)) == every


def test_every_value_differs_from_that_of_transformers_when_nothing_is_said(
    family: str, folder: Path
) -> None:
    config: Any = AutoConfig.from_pretrained(folder)
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
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
