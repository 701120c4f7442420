"""`mimo tiny` for any class of `AutoModelForImageTextToText`: its model, tokenizer and processor.

The configuration is the class's default, shrunk. The settings of its processors follow from the
configuration by their names. The special tokens are those that the processor asks for. The model's
tower says how many rows an image has.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from data.modalities.transformers import without_videos
from data.text.digits import chat_template, conversation
from mimo.checkpoint.hf.examples import features_of, num_rows
from mimo.checkpoint.hf.shrink import build, shrink
from mimo.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_TOKEN_KEY = re.compile(r"(.+?)_token_(?:id|index)")
_NAMED_TOKENS = {
    "bos_token": "<|startoftext|>",
    "pad_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    # Gemma-4's processor refuses images without these.
    "audio_token": "<|audio|>",
    "boa_token": "<|boa|>",
    "eoa_token": "<|eoa|>",
}
_PAD = _NAMED_TOKENS["pad_token"]
_PLACEHOLDERS = ("image_token", "media_placeholder_token")
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
_REFUSED = {
    "aria": "its processor makes images of 490 or 980 pixels, too many for a tiny tower",
    "t5gemma2": "it has an encoder and a decoder of text",
}
_SPECIAL = re.compile(r"<[^\s<>]+>|\[[A-Z_]+\]")
# Classes that share another's processors without transformers saying so.
_LIKE = {
    "fast_vlm": "llava",
    "glm_ocr": "glm46v",
    "glmga": "glm46v",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
}
# Keys of the configuration, by the name of a processor's setting.
_SYNONYMS = {
    "merge_size": ("spatial_merge_size", "merge_size", "downsample_factor"),
    "patch_size": ("patch_size", "spatial_patch_size"),
    "encoder_patch_size": ("patch_size",),
    "spatial_patch_size": (),
    "img_size": ("image_size",),
}
_TOWER = "get_image_features"
_PIXEL_TILES = (2, 6)  # smallest and largest image, in rows of the tower along an edge
_AROUND = ["<|vision_start|>", "<|vision_end|>"]
_ROWS = ("image_seq_length", "image_seq_len", "num_image_tokens", "num_query_tokens")


@dataclass
class _Tokens:
    """Special tokens that a processor asks for, gathered while it is made.

    named: by the tokenizer's attribute. is_around: whether the template opens and closes images.
    """

    named: dict[str, str] = field(default_factory=lambda: dict(_NAMED_TOKENS))
    others: list[str] = field(default_factory=lambda: ["<|im_start|>", *_AROUND])
    is_around: bool = False

    def tokenizer(self) -> PreTrainedTokenizerFast:
        from mimo.checkpoint.hf.tiny import byte_level_tokenizer

        specials = {token: name for name, token in self.named.items()}
        return byte_level_tokenizer({**dict.fromkeys(self.others), **specials})


def _sections(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield the configurations inside a configuration, with their keys, and itself at the end."""
    from transformers import PreTrainedConfig

    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from ((key if name == "" else name, part) for name, part in _sections(value))
    yield "", config


def _lookup(config: PreTrainedConfig, names: tuple[str, ...]) -> Any:
    """Return the first of these settings that the tower or the whole has; None if there is none."""
    parts = [part for key, part in _sections(config) if not re.match("text|audio|llm", key)]
    values = (getattr(part, name, None) for name in names for part in parts)
    return next((value for value in values if value is not None), None)


def _pinpoints(edge: int) -> list[list[int]]:
    return [[edge, 2 * edge], [2 * edge, edge], [2 * edge, 2 * edge]]


def _edge(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _defaults(kind: type) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        settings |= {k: v for k, v in vars(base).items() if not k.startswith("_")}
    return {k: v for k, v in settings.items() if isinstance(v, bool | int | float | list | dict)}


def _patches(config: PreTrainedConfig) -> int:
    """Return the number of patches of a square image; a first guess at its rows."""
    patch = _lookup(config, ("patch_size",)) or 14
    return (_edge(_lookup(config, ("image_size",)) or 28) // _edge(patch)) ** 2


def image_settings(kind: type, config: PreTrainedConfig) -> dict[str, Any]:
    """Return settings of an image processor that fit the tower. kind: the processor's class."""
    defaults = _defaults(kind)
    patch = _edge(_lookup(config, ("patch_size", "spatial_patch_size")) or 14)
    merge = _lookup(config, _SYNONYMS["merge_size"]) or defaults.get("merge_size", 1)
    unit = int(patch * merge)
    edge = _edge(_lookup(config, ("image_size",)) or 4 * unit)
    in_pixels = "merge_size" in defaults
    fixed = {
        **dict.fromkeys(("tile_size", "max_image_size", "scale_resolution", "image_size"), edge),
        "max_patches": 16 if in_pixels else 4,
        "min_image_tokens": 4,
        "draw_on_frames": False,  # it needs a font file
        "max_soft_tokens": 70,  # the least that Gemma-4 takes
        **dict.fromkeys(("max_image_tokens", "max_tiles"), 16),
        "image_grid_pinpoints": _pinpoints(edge),
        "merge_size": merge,
    }
    if kind.__name__.startswith("Cohere2"):
        fixed["patch_size"] = edge // unit  # of rows along the edge of a tile
    result = {}
    for name, default in defaults.items():
        value = _lookup(config, _SYNONYMS.get(name, (name,)))
        if name.endswith("size") and isinstance(default, dict):
            sizes = dict.fromkeys(default, patch if name == "patch_size" else edge)
            if name == "size" and in_pixels and "longest_edge" in default:
                low, high = ((tiles * unit) ** 2 for tiles in _PIXEL_TILES)
                sizes = {"shortest_edge": low, "longest_edge": high}
            elif default.keys() == {"shortest_edge", "longest_edge"}:
                sizes["shortest_edge"] = edge // 2
            elif name == "size" and "max_image_size" in defaults:
                sizes["longest_edge"] = 2 * edge  # so that there are several tiles
            result[name] = sizes
        elif name in fixed:
            result[name] = fixed[name]
        elif value is not None:
            result[name] = _edge(value) if isinstance(default, int) else value
    return result


def processor_settings(kind: type, config: PreTrainedConfig) -> dict[str, Any]:
    """Return settings of a whole processor that fit the model. kind: the processor's class."""
    names = inspect.signature(kind.__init__).parameters.keys()
    values = {name: _lookup(config, _SYNONYMS.get(name, (name,))) for name in names}
    result = {
        name: value
        for name, value in values.items()
        if "token" not in name and isinstance(value, bool | int | float | str | list)
    }
    if "num_additional_image_tokens" in names:  # CLIP's first row, which "default" leaves out
        strategy = result.get("vision_feature_select_strategy")
        result["num_additional_image_tokens"] = int(strategy == "default")
    return result | {name: _patches(config) for name in _ROWS if name in names}


def classes() -> dict[str, str]:
    """Return the names of the model classes by `model_type`."""
    from transformers.models.auto import modeling_auto

    return dict(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def _processor_classes(model_type: str) -> tuple[Any, Any, Any, Any]:
    """Return the classes of the whole processor and of those of images, videos and audio.

    The last two are None where there is none or a library is missing.
    """
    import transformers
    from transformers.models.auto import feature_extraction_auto as audios
    from transformers.models.auto import image_processing_auto as images
    from transformers.models.auto import processing_auto as wholes
    from transformers.models.auto import video_processing_auto as videos

    # Use these modules, because they complete the tables of `auto_mappings`.
    whole_names: dict[str, Any] = vars(wholes)["PROCESSOR_MAPPING_NAMES"]
    image_names: dict[str, Any] = vars(images)["IMAGE_PROCESSOR_MAPPING_NAMES"]
    video_names: dict[str, Any] = vars(videos)["VIDEO_PROCESSOR_MAPPING_NAMES"]
    audio_names: dict[str, Any] = vars(audios)["FEATURE_EXTRACTOR_MAPPING_NAMES"]
    if model_type in _REFUSED:
        raise ValueError(_REFUSED[model_type])
    like = _LIKE.get(model_type, model_type)
    whole = whole_names.get(like)
    related = [like, *(name for name, other in whole_names.items() if other == whole)]
    image = next(filter(None, map(image_names.get, related)), None)
    if whole is None or image is None:
        raise ValueError("transformers has no processor for it")
    video = (video_names.get(like) or {}).get("torchvision")
    audio = audio_names.get(like)
    class_names = (whole, image.get("pil", image.get("torchvision")), video, audio)
    kinds = [getattr(transformers, name) if name else None for name in class_names]
    usable = [None if getattr(kind, "is_dummy", False) else kind for kind in kinds]
    if None in usable[:2]:
        raise ValueError("its processor needs torchvision; install it")
    return usable[0], usable[1], usable[2], usable[3]


def sample(num_images: int) -> list[dict[str, Any]]:
    """Return a conversation about images of different sizes."""
    from PIL import Image

    images = [Image.effect_noise((40 + 50 * i, 60), 90).convert("RGB") for i in range(num_images)]
    messages = conversation(["image"] * num_images, "what digit is this ?", "7")
    for part, image in zip(messages[0]["content"], images, strict=False):
        part["image"] = image
    return messages


def encode(processor: Any, messages: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Return a conversation as the model's tensors."""
    return processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )


def _make_processor(
    kind: Any, parts: dict[str, Any], settings: dict[str, Any], tokens: _Tokens
) -> Any:
    """Return the processor with a tokenizer that has every special token it asks for."""
    for _ in range(100):
        tokenizer = tokens.tokenizer()
        try:
            processor = without_videos(kind)(**parts, tokenizer=tokenizer, **settings)
            values = {k: str(v) for k, v in vars(processor).items() if v and not k.endswith("_id")}
            texts = [text for value in values.values() for text in _SPECIAL.findall(value)]
            texts += [value for name, value in values.items() if name.endswith("_token")]
            unknown = [t for t in dict.fromkeys(texts) if t not in tokenizer.get_vocab()]
            if not unknown:
                names = ("image_placeholder_token", "image_token")
                image_tokens = (getattr(processor, name, None) for name in names)
                image = str(next(filter(None, image_tokens), "<image>"))
                template = chat_template({"image": image})
                for token in [] if tokens.is_around else _AROUND:
                    template = template.replace(token, "")
                processor.chat_template = template
                text = str(tokenizer.decode(encode(processor, sample(1))["input_ids"][0]))
                texts = dict.fromkeys(_SPECIAL.findall(text))
                unknown = [t for t in texts if t not in tokenizer.get_vocab()]
                if not unknown:
                    return processor
            tokens.others += unknown
        except (AttributeError, ValueError) as error:
            match = re.search(r"(?:attribute '?|an `)([a-z_]+_token)(_id)?\b", str(error))
            if match is None or match[1] in tokens.named:
                raise
            tokens.named[match[1]] = f"<|{match[1].removesuffix('_token')}|>"
    raise ValueError("its processor asks for ever more special tokens")


def _tower_rows(model: Any, inputs: Mapping[str, Any]) -> int:
    """Return the number of rows that the tower gives for the images of a sample."""
    import torch

    base = next((m for m in (getattr(model, "model", None), model) if hasattr(m, _TOWER)), None)
    if base is None:
        raise ValueError("the model has no get_image_features")
    known = inspect.signature(base.get_image_features).parameters
    with torch.no_grad():
        output = base.get_image_features(**{k: v for k, v in inputs.items() if k in known})
    return num_rows(features_of(output))


def _set_token_ids(
    config: PreTrainedConfig, processor: Any, tokens: _Tokens, image_id: int
) -> None:
    """Set the ids of special tokens and the sizes of vocabularies, in every section."""
    vocabulary = processor.tokenizer.get_vocab()
    sizes = {key: (len(vocabulary) // 64 + 2) * 64 for key in _VOCABULARIES}
    for section, part in _sections(config):
        if not re.match("vision|audio|vq", section):
            sizes["max_position_embeddings"] = 4096
            for key in sizes.keys() & vars(part).keys():
                setattr(part, key, sizes[key])
        for key, value in list(vars(part).items()):
            match = _TOKEN_KEY.fullmatch(key)
            if match is None or value is None or isinstance(value, dict):
                continue
            name = f"{match[1]}_token"
            token = getattr(processor, name, None) or tokens.named.get(name)
            if not isinstance(token, str) or token not in vocabulary:
                is_around = re.match("vision|im|boi|eoi", name)
                token = _AROUND[bool(re.search("end|eoi", name))] if is_around else _PAD
            token_id = image_id if name in _PLACEHOLDERS else vocabulary[token]
            setattr(part, key, [token_id] if isinstance(value, list) else token_id)


@dataclass(frozen=True)
class Whole:
    """A tiny model and its processor. files: the JSON files of the processors, by name."""

    model: PreTrainedModel
    processor: Any
    files: dict[str, dict[str, Any]]


def make(model_type: str) -> Whole:
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


def _make(model_type: str) -> Whole:
    import torch
    import transformers

    whole, image, video, audio = _processor_classes(model_type)
    config = shrink(getattr(transformers, classes()[model_type]).config_class())
    if getattr(config, "image_grid_pinpoints", None):
        config.image_grid_pinpoints = _pinpoints(_edge(_lookup(config, ("image_size",))))
    for _, part in _sections(config):
        if hasattr(part, "position_embedding_size"):
            part.position_embedding_size = 1024  # for images of any shape: Gemma-4 has 630 patches
    settings, pixels = processor_settings(whole, config), image_settings(image, config)
    if not settings.keys() & set(_ROWS):  # PaliGemma's processor reads it there
        pixels["image_seq_length"] = _patches(config)
    parts: dict[str, Any] = {k: None for k in whole.get_attributes() if k != "tokenizer"}
    if video is not None and "video_processor" in parts:
        parts["video_processor"] = video(**image_settings(video, config))
    if audio is not None and "feature_extractor" in parts:
        parts["feature_extractor"] = audio()
    tokens = _Tokens()
    for _ in range(4):
        parts["image_processor"] = image(**pixels)
        processor = _make_processor(whole, parts, settings, tokens)
        inputs = encode(processor, sample(1))
        special = {*processor.tokenizer.all_special_ids}
        special |= {*processor.tokenizer.get_added_vocab().values()}
        ids = inputs["input_ids"].flatten().tolist()
        named_id = getattr(processor, "image_token_id", None)
        image_id = max(special & {*ids}, key=lambda i: (ids.count(i), i == named_id))
        place = ids.index(image_id)
        if place and ids[place - 1] not in special and not tokens.is_around:
            tokens.is_around = True
            continue
        _set_token_ids(config, processor, tokens, image_id)
        with torch.random.fork_rng(devices=[]):
            model = build(config)
        rows, count = _tower_rows(model, inputs), ids.count(image_id)
        owner = next((part for part in (settings, pixels) if part.keys() & set(_ROWS)), None)
        if rows == count or owner is None:
            break
        key = next(name for name in _ROWS if name in owner)
        owner[key] = owner[key] * rows // count
    for num_images in (1, 2):
        _check(model, encode(processor, sample(num_images)), image_id)
    subprocessors = {
        name: json.loads(part.to_json_string()) for name, part in parts.items() if part is not None
    }
    whole_settings = {"processor_class": whole.__name__, **settings, **subprocessors}
    return Whole(model, processor, {"processor_config.json": whole_settings})


def _check(model: Any, inputs: Mapping[str, Any], image_id: int) -> None:
    """Raise ValueError unless placeholders equal rows in number and the loss is finite."""
    import torch

    with torch.no_grad():
        loss = model(**{**inputs, "labels": inputs["input_ids"]}).loss
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss.item()}")
    placeholders = int((inputs["input_ids"] == image_id).sum())
    if (rows := _tower_rows(model, inputs)) != placeholders:
        raise ValueError(f"{placeholders} placeholders for {rows} rows of the tower")
