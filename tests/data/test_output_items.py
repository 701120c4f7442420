"""Output items in the index, in packed lanes and in what a rank loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.batch import pack_lane, plan_microbatch, queries_of, read_items
from data.decoding import Decoding, Task
from data.index.reader import SampleReader, plans_of_items
from data.index.samples import Index, Processors, settings_fingerprint
from data.loader import LoadedStep, StepLoader
from data.modalities.images import ImageProcessor, TargetImages
from data.order import SampleOrder
from data.packing import Used
from data.text.chat import ChatTokenizer
from data.text.messages import MediaText
from data.text.outputs import OutputText
from data.worker_process import ITEM, TEXT
from tests.data.conftest import IndexOf, MakeImage

START, END = "<|image_gen_start|>", "<|image_gen_end|>"
IMAGE = {"type": "image"}
# Each sample: the parts of its user's messages and of its answers, in turns.
TURNS: list[list[list[Any]]] = [
    [["write 3"], [IMAGE]],
    [[IMAGE, "read"], ["7"]],
    [[IMAGE, "repeat", IMAGE], ["3", IMAGE, "7", IMAGE], ["see"], ["this is", IMAGE]],
    [["read"], ["7"]],
    [["see"], ["7"], [IMAGE], [IMAGE]],
]
SIZES = [(28, 28), (10, 6), (56, 28), (8, 8), (28, 56), (12, 4), (6, 6)]


def messages(turns: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [
        {
            "role": ("user", "assistant")[number % 2],
            "content": [
                {"type": "text", "text": part} if isinstance(part, str) else part for part in parts
            ],
        }
        for number, parts in enumerate(turns)
    ]


def count_files(turns: Sequence[Sequence[Any]]) -> int:
    parts = [part for parts in turns for part in parts if not isinstance(part, str)]
    return sum(part.get("frames", 1) for part in parts)


def shard_of(samples: Sequence[Sequence[Sequence[Any]]], make_image: MakeImage) -> dict[str, bytes]:
    members, drawn = {}, 0
    for number, turns in enumerate(samples):
        members[f"{number}.json"] = json.dumps({"messages": messages(turns)}).encode()
        for item in range(count_files(turns)):
            members[f"{number}.{item}.png"] = make_image(*SIZES[drawn % len(SIZES)])
            drawn += 1
    return members


Open = Callable[..., SampleReader]


@pytest.fixture
def opened(digits: Path, index_of: IndexOf, make_image: MakeImage) -> Open:
    """Indexes samples with a generator of 2 queries, or of the prompt."""

    def open_reader(
        samples: Sequence[Sequence[Sequence[Any]]] = TURNS,
        skipped: int | None = None,
        inputs: bool = True,
    ) -> SampleReader:
        texts = {"image": MediaText("<|image_pad|>")} if inputs else {}
        output = OutputText(START, END, skipped)
        chat = ChatTokenizer(digits / "tokenizer", texts, {"output.image": output})
        targets = TargetImages(2, 64, 2 if skipped is None else 0, tower_width=8)
        media: Processors = {"output.image": targets}
        if inputs:
            media = {"image": ImageProcessor(min_pixels=28 * 28), **media}
        index = index_of(shard_of(samples, make_image), chat, media)
        return SampleReader(index, chat, media)

    return open_reader


def reasons(index: Index) -> list[str]:
    return [f"{sample.key}: {sample.reason}" for sample in index.skipped_samples()]


def test_the_index_knows_outputs_like_inputs(opened: Open) -> None:
    reader = opened()
    index = reader.index
    assert (index.media, len(index), index.num_skipped) == (("image", "output.image"), 5, 0)
    assert np.diff(index.column("item_start")).tolist() == [1, 1, 5, 0, 2]
    # 28 x 28, then what the model draws and reads in turn.
    assert index.column("item_media").tolist() == [1, 0, 0, 0, 1, 1, 1, 0, 1]
    outputs = index.column("item_media") == 1
    assert index.column("item_rows", np.flatnonzero(outputs)).tolist() == [2] * 5
    plans = reader.plans(np.arange(index.num_items))
    assert [plan.is_output for plan in plans] == outputs.tolist()
    assert index.column("item_cost").tolist() == [plan.cost for plan in plans]
    assert index.unknown_share == 0
    start, end = reader.chat.output_ids["output.image"]
    for sample in range(len(index)):
        encoded, items = reader.sample(sample), index.items_of_sample(sample)
        for item, first in zip(items, encoded.item_offsets, strict=True):
            if outputs[item]:
                assert encoded.input_ids[[first - 1, first + 2]].tolist() == [start, end]


def test_prompt_conditions_are_the_rows_of_their_items(opened: Open) -> None:
    reader = opened(skipped=2)
    index = reader.index
    assert (len(index), index.num_skipped) == (5, 0)
    encoded, items = reader.sample(2), index.items_of_sample(2)
    starts = np.flatnonzero(encoded.input_ids == reader.chat.output_ids["output.image"][0])
    outputs = np.array(items)[index.column("item_media", np.array(items)) == 1]
    first, rows = (index.column(n, outputs) for n in ("item_placeholder", "item_rows"))
    assert (first + rows).tolist() == starts.tolist()
    assert first.tolist() == [2, *(starts[:-1] + 2)]
    assert index.unknown_share == 0


def test_the_share_of_unknown_text_does_not_count_conditions_and_queries(opened: Open) -> None:
    for skipped in (None, 0):
        reader = opened([[["xyz"], [IMAGE]]], skipped=skipped)
        # xyz, and seven tokens: two turns with role and end, and start and end of the item.
        texts = len(reader.sample(0).input_ids) - (2 if skipped is None else 0)
        assert texts == 9
        assert reader.index.unknown_share == 1 / 9


def test_samples_without_a_condition_are_left_out_with_the_reason(opened: Open) -> None:
    samples = [TURNS[0], [["write"], ["3", IMAGE, IMAGE]], TURNS[3]]
    index = opened(samples, skipped=0).index
    assert len(index) == 2
    (reason,) = reasons(index)
    assert reason.startswith("1: sample '1': item 1 has no condition: its start token is token")
    index = opened(samples, skipped=50).index
    assert [reason[0] for reason in reasons(index)] == ["0", "1"]


def test_bad_targets_leave_their_sample_out(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SIZES", [(8, 8), (6, 6), (6, 6), (402, 2), (1, 4)])
    samples = [TURNS[0], [["write"], [IMAGE | {"frames": 2}]], [["write"], [IMAGE]], TURNS[0]]
    index = opened(samples).index
    assert len(index) == 2
    several, long = reasons(index)
    assert several == "1: item 0: a part of 2 frames, but need a still image"
    assert long.startswith("2: item 0: image of 402 x 2 pixels has an aspect ratio of 201")


def test_without_an_encoder_images_of_users_are_refused(opened: Open) -> None:
    reader = opened([TURNS[0], TURNS[3]], inputs=False)
    assert reader.index.media == ("output.image",)
    assert reader.patches(0).shape == (16, 12)  # 28 x 28 become 8 x 8
    match = (
        "1 samples have items of a modality that no encoder takes.*\n.*: 1: image\nthe encoders "
        "take none, and the generators make image in an assistant's message; give one of them"
    )
    with pytest.raises(ValueError, match=match):
        opened(TURNS[:2], inputs=False)


def test_without_a_generator_the_message_is_named(
    digits: Path, index_of: IndexOf, make_image: MakeImage
) -> None:
    with pytest.raises(ValueError, match=r": 0: image in an assistant's message\n"):
        index_of(shard_of(TURNS[:1], make_image), ChatTokenizer(digits / "tokenizer", {}), {})


def test_settings_of_generators_change_the_fingerprint(digits: Path) -> None:
    def fingerprint(output: OutputText, *sizes: int) -> str:
        chat = ChatTokenizer(digits / "tokenizer", {}, {"output.image": output})
        return settings_fingerprint(chat, {"output.image": TargetImages(*sizes, tower_width=8)})

    one = OutputText(START, END)
    made = [
        fingerprint(one, 2, 64, 2),
        fingerprint(one, 4, 64, 2),
        fingerprint(one, 2, 32, 2),
        fingerprint(one, 2, 64, 3),
        fingerprint(OutputText(END, START), 2, 64, 2),
        fingerprint(OutputText(START, END, 0), 2, 64, 2),
        fingerprint(OutputText(START, END, 1), 2, 64, 2),
    ]
    assert len(set(made)) == len(made)


# ------------------------------------------------------------------ packing


@pytest.mark.parametrize("skipped", [None, 0])
def test_a_lane_has_places_for_queries_and_no_position_of_an_output(
    opened: Open, skipped: int | None
) -> None:
    reader = opened(skipped=skipped)
    order = SampleOrder([5], [1.0], 0, 1)
    samples = plan_microbatch([reader.index], order, [np.arange(5)])
    encoded = [reader.sample(int(number)) for number in samples.sample]
    source = samples.source[samples.item_sample]
    plans = plans_of_items([reader], source, samples.item)
    by_sample = [
        [plan for plan, of in zip(plans, samples.item_sample, strict=True) if of == number]
        for number in range(5)
    ]
    read = [[plan for plan in items if not plan.is_output] for items in by_sample]
    lane = pack_lane(
        [read_items(*pair) for pair in zip(encoded, by_sample, strict=True)],
        [[plan.row_grid for plan in items] for items in read],
        samples.loss_tokens,
        int(samples.lane_tokens[0]),
        reader.chat.pad_token_id,
        queries=queries_of(samples, slice(None), plans),
    )
    assert len(lane.items) == 4
    start, end = reader.chat.output_ids["output.image"]
    starts = np.flatnonzero(lane.input_ids == start)
    assert len(starts) == 5
    if skipped is None:
        assert lane.queries == tuple(("output.image", int(first) + 1, 2) for first in starts)
        for _, first, count in lane.queries:
            assert (lane.input_ids[first : first + count] == reader.chat.pad_token_id).all()
            assert not lane.loss_mask[first - 1 : first + count - 1].any()
            assert lane.loss_mask[[first - 2, first + count - 1]].all()
    else:
        assert lane.queries == ()
    for first in starts:  # positions go on as in text
        last = first + 1 + (2 if skipped is None else 0)
        assert lane.input_ids[last] == end
        steps = np.diff(lane.position_ids[:, first - 1 : last + 1])
        assert (steps == 1).all()
    # A blanked sample has no items; its tokens stay.
    blanked = samples.without({0, 1, 2, 3, 4})
    assert queries_of(blanked, slice(None), []) == []
    empty = [read_items(sample, []) for sample in encoded]
    assert all(len(sample.item_offsets) == 0 for sample in empty)


# ------------------------------------------------------------------ loading


class Planner:
    def __init__(self, index: Index) -> None:
        order = SampleOrder([len(index)], [1.0], 0, 1)
        self.samples = plan_microbatch([index], order, [np.arange(len(index))])

    def microbatches(self, step: int) -> Sequence[Any]:
        return [SimpleNamespace(samples=self.samples)]

    def used_before(self, step: int) -> Used:
        return Used()


def load(reader: SampleReader, path: Path, texts: bool, workers: int = 0) -> LoadedStep:
    """One step where this rank needs the texts, or the items that are outputs."""

    def tasks(
        step: int,
        microbatches: Sequence[Any],
        readers: Sequence[SampleReader],
        path_of: Callable[[str], Path],
    ) -> Iterator[Task]:
        samples = microbatches[0].samples
        numbers = np.arange(5) if texts else samples.items_of_media("output.image")
        for number in numbers.tolist():
            sample = number if texts else int(samples.item_sample[number])
            address = samples.sample[number] if texts else samples.item[number]
            kind = TEXT if texts else ITEM
            place = path_of(f"{kind}.{number}")
            yield Task(
                step, readers[0], kind, 0, number, sample, 0, int(address), 0, 1, place, False
            )

    root = path if workers else None
    with Decoding([reader], tasks, root=root, job="job", num_workers=workers) as decoding:
        loader = StepLoader(Planner(reader.index), [reader], decoding, 0, 1)
        try:
            return loader.next()
        finally:
            loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_pixels_of_outputs_arrive_for_the_right_item(
    opened: Open, tmp_path: Path, workers: int
) -> None:
    reader = opened()
    loaded = load(reader, tmp_path, texts=False, workers=workers)
    (patches,) = loaded.patches
    wanted = np.flatnonzero(reader.index.column("item_media") == 1).tolist()
    assert sorted(patches) == [(0, item) for item in wanted]
    for item in wanted:
        media, (file,) = reader.media(item), reader.index.files_of_part(item)
        assert isinstance(media, TargetImages)
        image = reader.decoded(item, file)
        size = media.resized(*image.size)
        pixels = np.asarray(image.resize(size, media.RESAMPLING), np.float32) / 127.5 - 1
        width, height = size
        squares = pixels.reshape(height // 2, 2, width // 2, 2, 3).transpose(0, 2, 4, 1, 3)
        values = media.wire.values(patches[0, item].numpy())
        np.testing.assert_allclose(values, squares.reshape(-1, 12), atol=1e-6)


@pytest.mark.parametrize("workers", [0, 1])
def test_texts_arrive_with_the_places_of_outputs(
    opened: Open, tmp_path: Path, workers: int
) -> None:
    reader = opened(skipped=1)
    loaded = load(reader, tmp_path, texts=True, workers=workers)
    samples = Planner(reader.index).samples
    for number, encoded in loaded.encoded[0].items():
        expected = reader.sample(int(samples.sample[number]))
        for name, array in vars(expected).items():
            np.testing.assert_array_equal(getattr(encoded, name), array, err_msg=name)


def test_an_unreadable_text_has_no_items(opened: Open, tmp_path: Path) -> None:
    reader = opened()
    path = Path(reader.index.shards[0])
    data = path.read_bytes()
    place = data.index(b'{"messages"')
    stat = path.stat()
    path.write_bytes(data[:place] + b"?" + data[place + 1 :])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    loaded = load(reader, tmp_path, texts=True)
    assert len(loaded.unusable) == 1
    (number,) = loaded.unusable
    blank = loaded.encoded[0][number]
    assert (len(blank.item_offsets), len(blank.item_rows)) == (0, 0)
    assert read_items(blank, []).loss_mask.sum() == 0
