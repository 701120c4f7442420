"""Compare the processor, the index and the tower on the first samples of a source.

For each item the tower has to return as many embeddings as the processor writes placeholders. The
compared tower has few and narrow layers; the number of its embeddings is that of the whole tower.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.index.reader import SampleReader, UnreadableSample
from data.modalities.image_files import to_rgb
from data.modalities.processor import PartPlan
from data.modalities.transformers import ItemForm, TransformersMedia, load_processor
from data.text.messages import ITEM_SLOT, item_parts
from data.text.outputs import split_outputs
from mimo.checkpoint.hf.recipes import config_of_folder
from mimo.checkpoint.hf.shrink import build, narrow
from mimo.config.schema import Recipe
from mimo.engines.fsdp.halves import OutputForm, features

_SAMPLES, _ITEMS, _MAX_VALUES = 4096, 16, 2**23
_MISMATCH = "processor files and config.json do not belong together; restore them"


def check_first_samples(recipe: Recipe, reader: SampleReader) -> None:
    """Compare the numbers of placeholders of the first samples, for `family: transformers`.

    The smallest of the first items of each modality is compared with the tower, and two samples
    with images with the whole processor. Raises ValueError if a number differs.
    """
    if reader.index.num_items:
        _check_tower(recipe, reader)
        _check_whole_processor(recipe, reader)


def _check_tower(recipe: Recipe, reader: SampleReader) -> None:
    smallest: dict[str, ItemForm] = {}
    for item in np.flatnonzero(~_is_output(reader, _SAMPLES))[:_ITEMS].tolist():
        media, plan = reader.media(item), reader.plan(item)
        assert isinstance(media, TransformersMedia)
        form = media.form(plan.grid, reader.index.part(item).fps)
        if form.num_values > _MAX_VALUES:  # the tower would take minutes and all memory
            continue
        if form.num_values < smallest.setdefault(media.modality, form).num_values:
            smallest[media.modality] = form
    tower = build(narrow(config_of_folder(Path(recipe.init_from or ""))))
    for modality, form in smallest.items():
        # Ones, because Idefics-3 drops an item of zeros as padding.
        arrays = {**form.arrays, **form.content(torch.ones(form.num_values))}
        try:
            with torch.no_grad():
                output = features(tower, modality, arrays)
            rows = len(OutputForm.of(output).rows(output))
        except Exception as error:  # whatever a class's own code raises
            raise ValueError(
                f"the tower does not take what the processor of {recipe.init_from} makes of an "
                f"{modality} ({type(error).__name__}: {error}): {_MISMATCH}"
            ) from error
        if rows != form.num_rows:
            raise ValueError(
                f"the processor of {recipe.init_from} writes {form.num_rows} placeholders for an "
                f"{modality}, but the tower returns {rows} embeddings: {_MISMATCH}"
            )


def _is_output(reader: SampleReader, count: int) -> np.ndarray:
    """Return bool (m,): whether each of the first ``count`` items is an output."""
    index = reader.index
    of_media = np.array([bool(split_outputs([name])[1]) for name in index.media])
    return of_media[index.column("item_media", slice(0, min(count, index.num_items)))]


def _compared_samples(reader: SampleReader) -> list[int]:
    """Return the first sample with an item, and the first with two, that have no output.

    The processor would write an output as an input.
    """
    index = reader.index
    starts = index.column("item_start", slice(0, 1 + min(_SAMPLES, len(index))))
    outputs = np.concatenate(([0], np.cumsum(_is_output(reader, int(starts[-1])))))
    counts = np.where(np.diff(outputs[starts]), 0, np.diff(starts))
    firsts = [np.flatnonzero(counts >= least)[:1] for least in (1, 2)]
    return np.unique(np.concatenate(firsts)).tolist()


def _check_whole_processor(recipe: Recipe, reader: SampleReader) -> None:
    """Compare the first sample with images, and the first with several.

    Items of other modalities are prepared one by one, so there is nothing to compare.
    """
    index, chat = reader.index, reader.chat
    processor = load_processor(recipe.init_from or "")
    ids = list(chat.placeholder_ids.values())
    for sample in _compared_samples(reader):
        try:
            messages, encoded = reader.messages(sample), reader.sample(sample)
            parts: Any = item_parts(messages)
            if any(part["type"] != "image" for part in parts):
                continue
            for part, item in zip(parts, index.items_of_sample(sample), strict=True):
                (file,) = index.files_of_part(item)
                part["image"] = to_rgb(reader.decoded(item, file))
        except UnreadableSample:
            continue
        try:
            outputs = processor.apply_chat_template(
                messages,
                chat_template=chat.template,
                tokenize=True,
                return_dict=True,
                processor_kwargs={"return_text_replacement_offsets": True},
            )
        except Exception as error:  # a processor is a program, and may fail in any way
            raise ValueError(
                f"the processor of {recipe.init_from} does not take sample {index.key(sample)!r} "
                f"({type(error).__name__}: {error}); leave out such samples"
            ) from error
        written = int(np.isin(outputs["input_ids"][0], ids).sum())
        ours = int(np.isin(encoded.input_ids, ids).sum())
        if written != ours:
            raise ValueError(
                f"sample {index.key(sample)!r} has {ours} placeholders if each image is prepared "
                f"alone, but the processor of {recipe.init_from} writes {written} for all its "
                f"{len(parts)} images together; leave out samples with several images"
            )
        texts = [part["replacement"] for part in outputs["text_replacement_offsets"][0]]
        plans = [reader.plan(item) for item in index.items_of_sample(sample)]
        if texts != [_text_of(plan, chat.placeholders["image"]) for plan in plans]:
            raise ValueError(
                f"the processor of {recipe.init_from} writes other text around the {len(parts)} "
                f"images of sample {index.key(sample)!r} together than around each alone; leave "
                "out samples with several images"
            )


def _text_of(plan: PartPlan, placeholder: str) -> str:
    """Return the text of an item, with a placeholder for each of its rows."""
    rows = iter(plan.slot_rows or (plan.num_rows,))
    return re.sub(re.escape(ITEM_SLOT), lambda _: placeholder * next(rows), plan.text)
