"""`mimo tiny` for any class of `AutoModelForImageTextToText`: its model, tokenizer and processor.

The configuration is the class's default, shrunk. The settings of its processors follow from the
configuration by their names. The special tokens are those that the processor's code names. The
model's tower says how many rows an image has.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import feature_extraction_auto as audios
from transformers.models.auto import image_processing_auto as images
from transformers.models.auto import modeling_auto as models
from transformers.models.auto import processing_auto as wholes
from transformers.models.auto import video_processing_auto as videos

from data.text.digits import chat_template, conversation
from mimo.checkpoint.hf.examples import count_rows
from mimo.checkpoint.hf.shrink import TABLES, build, sections, shrink
from mimo.errors import InputError

_SPECIAL = re.compile(r"<[^\s<>{}]+>|\[[A-Z_]+\]")
_TOKEN_KEY = re.compile(r"(.+?_token)_(?:id|index)")
_PLACEHOLDERS = ("image_token", "media_placeholder_token")
_PIXEL_TILES = (2, 6)  # smallest and largest image, in rows of the tower along an edge
_ROWS = ("image_seq_length", "image_seq_len", "num_image_tokens")


def classes() -> dict[str, str]:
    """Return the names of the model classes by `model_type`."""
    return dict(models.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def make(model_type: str) -> tuple[PreTrainedModel, Any]:
    """Make a tiny model of a class, with its processor.

    Raises InputError if a class cannot be made.
    """
    try:
        return _make(model_type)
    except Exception as error:  # a class may refuse a configuration in any way
        reason = next(iter(str(error).strip().splitlines()), "")
        raise InputError(
            f"{model_type}: no tiny model can be made: {type(error).__name__}: {reason}"
        ) from error


def _make(model_type: str) -> tuple[PreTrainedModel, Any]:
    if reason := TABLES["refused"].get(model_type):
        raise ValueError(reason)
    whole, image, video, audio = _processor_classes(model_type)
    config = shrink(getattr(transformers, classes()[model_type]).config_class())
    for _, part in sections(config):
        if hasattr(part, "position_embedding_size"):
            part.position_embedding_size = 1024  # for images of any shape: Gemma-4 has 630 patches
        for key, value in TABLES["towers"].get(model_type, {}).items():
            if key in vars(part):
                setattr(part, key, value)
    settings = _processor_settings(whole, config) | TABLES["whole_processors"].get(model_type, {})
    pixels = _image_settings(image, config) | TABLES["image_processors"].get(model_type, {})
    if not settings.keys() & set(_ROWS):  # PaliGemma's processor reads it there
        pixels["image_seq_length"] = _num_patches(config)
    parts: dict[str, Any] = {k: None for k in whole.get_attributes() if k != "tokenizer"}
    if video is not None and "video_processor" in parts:
        parts["video_processor"] = video(**_image_settings(video, config))
    if audio is not None and "feature_extractor" in parts:
        parts["feature_extractor"] = audio()
    for _ in range(2):
        parts["image_processor"] = image(**pixels)
        processor = _make_processor(whole, parts, settings)
        inputs = encode(processor, 1)
        special = set(processor.tokenizer.get_added_vocab().values())
        ids = inputs["input_ids"].flatten().tolist()
        named_id = getattr(processor, "image_token_id", None)
        image_id = max(special.intersection(ids), key=lambda i: (ids.count(i), i == named_id))
        _set_token_ids(config, processor, image_id)
        model = build(config)
        owner = settings if settings.keys() & set(_ROWS) else pixels
        key = next(name for name in _ROWS if name in owner)
        owner[key] = owner[key] * count_rows(model, "image", inputs) // ids.count(image_id)
    for num_images in (1, 2):
        _check(model, encode(processor, num_images), image_id)
    return model, processor


def _processor_classes(model_type: str) -> list[Any]:
    """Return the classes of the whole processor and of those of images, videos and audio.

    The last two may be None.
    """
    name = TABLES["like"].get(model_type, model_type)

    def names(module: Any, table: str) -> Any:
        return vars(module)[f"{table}_MAPPING_NAMES"].get(name)

    whole, audio = names(wholes, "PROCESSOR"), names(audios, "FEATURE_EXTRACTOR")
    image, video = names(images, "IMAGE_PROCESSOR"), names(videos, "VIDEO_PROCESSOR") or {}
    if whole is None or image is None:
        raise ValueError("transformers has no processor for it")
    image, video = image.get("pil", image.get("torchvision")), video.get("torchvision")
    class_names = (whole, image, video, audio)
    return [getattr(transformers, name) if name else None for name in class_names]


def _make_processor(kind: Any, parts: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Return the processor with a tokenizer that has every special token it asks for."""
    from mimo.checkpoint.hf.tiny import byte_level_tokenizer

    source = inspect.getsource(sys.modules[kind.__module__])
    names = re.findall(
        r"tokenizer\.(?!add_)([a-z_]+_token)\b|tokenizer, \"([a-z_]+_token)\"", source
    )
    named = {name: f"<|{name.removesuffix('_token')}|>" for pair in names for name in pair if name}
    specials = {token: name for name, token in (named | TABLES["tokens"]).items()}
    others = ["<|im_start|>", *_SPECIAL.findall(source)]
    if "<row_{" in source:  # of the tiles of an image
        others += [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    processor: Any = None
    for _ in range(2):
        tokenizer = byte_level_tokenizer({**dict.fromkeys(others), **specials})
        processor = kind(**parts, tokenizer=tokenizer, **settings)
        values = [v for k, v in vars(processor).items() if k.endswith("_token")]
        others += [value for value in values if isinstance(value, str)]
    tokens = (getattr(processor, n, None) for n in ("image_placeholder_token", "image_token"))
    template = chat_template({"image": next(filter(None, tokens), "<image>")})
    if kind.__name__.startswith("HunYuan"):  # it insists on its own tokens around an image
        template = template.replace("<|vision_start|>", processor.image_start_token)
        template = template.replace("<|vision_end|>", processor.image_end_token)
    processor.chat_template = template
    return processor


def _lookup(config: PreTrainedConfig, name: str) -> Any:
    """Return a processor's setting from the tower or the whole; None if neither has it."""
    parts = [part for key, part in sections(config) if not re.match("text|audio|llm", key)]
    names = TABLES["synonyms"].get(name, (name,))
    values = (getattr(part, name, None) for name in names for part in parts)
    return next((value for value in values if value is not None), None)


def _edge(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _num_patches(config: PreTrainedConfig) -> int:
    """Return the number of patches of a square image; a first guess at its rows."""
    edge, patch = _lookup(config, "image_size") or 28, _lookup(config, "patch_size") or 14
    return (_edge(edge) // _edge(patch)) ** 2


def _processor_settings(kind: Any, config: PreTrainedConfig) -> dict[str, Any]:
    """Return settings of a whole processor that fit the model. kind: the processor's class."""
    names = inspect.signature(kind.__init__).parameters.keys()
    result = {
        name: value
        for name in names
        if "token" not in name
        and isinstance(value := _lookup(config, name), bool | int | float | str | list)
    }
    if "num_additional_image_tokens" in names:  # CLIP's first row, which "default" leaves out
        strategy = result.get("vision_feature_select_strategy")
        result["num_additional_image_tokens"] = int(strategy == "default")
    return result | {name: _num_patches(config) for name in _ROWS if name in names}


def _image_settings(kind: Any, config: PreTrainedConfig) -> dict[str, Any]:
    """Return settings of an image processor that fit the tower. kind: the processor's class."""
    defaults = {k: v for base in reversed(kind.__mro__) for k, v in vars(base).items()}
    patch = _edge(_lookup(config, "patch_size") or 14)
    merge = _lookup(config, "merge_size") or defaults.get("merge_size", 1)
    unit = int(patch * merge)
    edge = _edge(_lookup(config, "image_size") or 4 * unit)
    in_pixels = "merge_size" in defaults
    fixed = {
        **{"merge_size": merge, "tile_size": edge, "scale_resolution": edge},
        **{"max_patches": 16 if in_pixels else 4, "min_image_tokens": 4, "max_image_tokens": 16},
        "draw_on_frames": False,  # it needs a font file
        "max_soft_tokens": 70,  # the least that Gemma-4 takes
    }
    if kind.__name__.startswith("Cohere2"):
        fixed["patch_size"] = edge // unit  # of rows along the edge of a tile

    def setting(name: str, default: Any) -> Any:
        if name.endswith("size") and isinstance(default, dict):
            sizes = dict.fromkeys(default, patch if name == "patch_size" else edge)
            if name == "size" and in_pixels and "longest_edge" in default:
                low, high = ((tiles * unit) ** 2 for tiles in _PIXEL_TILES)
                return {"shortest_edge": low, "longest_edge": high}
            if default.keys() == {"shortest_edge", "longest_edge"}:
                sizes["shortest_edge"] = edge // 2
            elif name == "size" and "longest_edge" in default and "max_image_size" in defaults:
                sizes["longest_edge"] = 2 * edge  # so that there are several tiles
            return sizes
        if name in fixed:
            return fixed[name]
        value = _lookup(config, name)
        return _edge(value) if value is not None and isinstance(default, int) else value

    settings = {
        name: setting(name, default)
        for name, default in defaults.items()
        if isinstance(default, bool | int | float | list | dict) and not name.startswith("_")
    }
    return {name: value for name, value in settings.items() if value is not None}


def encode(processor: Any, num_images: int) -> Mapping[str, Any]:
    """Return a conversation about images of different sizes as the model's tensors."""
    messages = conversation(["image"] * num_images, "what digit is this ?", "7")
    sizes = [(40 + 50 * i, 60) for i in range(num_images)]
    images: Any = [Image.effect_noise(size, 90).convert("RGB") for size in sizes]
    is_flat = type(processor).__name__.startswith("GotOcr2")  # reads nested lists as pages
    return processor(
        text=[processor.apply_chat_template(messages)],
        images=images if is_flat else [images],
        add_special_tokens=False,
        return_mm_token_type_ids=True,
        return_tensors="pt",
    )


def _set_token_ids(config: PreTrainedConfig, processor: Any, image_id: int) -> None:
    """Set the ids of special tokens and the sizes of vocabularies, in every section."""
    tokenizer = processor.tokenizer
    vocabulary = tokenizer.get_vocab()
    size = (len(vocabulary) // 64 + 2) * 64
    sizes = {"vocab_size": size, "vocab_size_per_layer_input": size}
    sizes["max_position_embeddings"] = 4096
    for section, part in sections(config):
        if not re.match("vision|audio|vq", section):
            for key in sizes.keys() & vars(part).keys():
                setattr(part, key, sizes[key])
        for key, value in list(vars(part).items()):
            match = _TOKEN_KEY.fullmatch(key)
            if match is None or value is None or isinstance(value, dict):
                continue
            token = getattr(processor, match[1], getattr(tokenizer, match[1], None))
            token_id = vocabulary.get(token, tokenizer.pad_token_id)
            token_id = image_id if match[1] in _PLACEHOLDERS else token_id
            setattr(part, key, [token_id] if isinstance(value, list) else token_id)


def _check(model: Any, inputs: Mapping[str, Any], image_id: int) -> None:
    """Raise ValueError unless placeholders equal rows in number and the loss is finite."""
    with torch.no_grad():
        loss = model(**{**inputs, "labels": inputs["input_ids"]}).loss
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss.item()}")
    placeholders = int((inputs["input_ids"] == image_id).sum())
    if (rows := count_rows(model, "image", inputs)) != placeholders:
        raise ValueError(f"{placeholders} placeholders for {rows} rows of the tower")
