"""Items that a model answers with: their tokens, what of them counts, and what conditions them.

A truth is written as in `test_label_masks`. A query position is a padding token in it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.text.chat import ChatTokenizer, EncodedSample
from data.text.messages import MessagesError, UnknownMediaError
from data.text.outputs import OutputText
from tests.data.text.conftest import (
    END,
    IMAGE,
    PROMPT,
    QUERIES,
    START,
    Open,
    answer,
    with_tokens,
)
from tests.data.text.test_label_masks import tokens_of, user

TRUTHS: list[tuple[str, list[dict[str, Any]], list[int], str]] = [
    (
        "qwen3_vl",
        [user(IMAGE, "draw this"), answer("so ", IMAGE, " and ", IMAGE)],
        [1, 3, 2],
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>draw this<|im_end|>\n"
        f"<|im_start|>assistant\n«so {START}»<|endoftext|><|endoftext|><|endoftext|>"
        f"«{END} and {START}»<|endoftext|><|endoftext|>«{END}<|im_end|>»\n",
    ),
    (
        "qwen3_vl",
        [user("draw"), answer(IMAGE), user(IMAGE, "again"), answer(f"{START}a", IMAGE, f"{END}")],
        [1, 1, 1],
        "<|im_start|>user\ndraw<|im_end|>\n"
        f"<|im_start|>assistant\n«{START}»<|endoftext|>«{END}<|im_end|>»\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>again<|im_end|>\n"
        f"<|im_start|>assistant\n«\\{START}a{START}»<|endoftext|>«{END}\\{END}<|im_end|>»\n",
    ),
    (
        "qwen2_5_vl",
        [user("draw"), answer("a few ", IMAGE)],
        [0],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\ndraw<|im_end|>\n"
        f"<|im_start|>assistant\n«a few {START}{END}<|im_end|>»\n",
    ),
    (
        "qwen3",
        [user("draw"), answer(IMAGE, "that")],
        [1],
        "<|im_start|>user\ndraw<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\n"
        f"{START}»<|endoftext|>«{END}that<|im_end|>»\n",
    ),
    (
        "gemma3",
        [user(IMAGE, " draw "), answer(" a ", IMAGE, " few "), user("more"), answer(IMAGE)],
        [1, 2, 1],
        "<bos><start_of_turn>user\n\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
        "draw<end_of_turn>\n"
        f"<start_of_turn>model\n«a{START}»<pad><pad>«{END}few<end_of_turn>»\n"
        "<start_of_turn>user\nmore<end_of_turn>\n"
        f"<start_of_turn>model\n«{START}»<pad>«{END}<end_of_turn>»\n",
    ),
    (
        "digits",
        [user(IMAGE, "what digit is this ?"), answer("7 ", IMAGE)],
        [2, 2],
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
        "what digit is this ?<|im_end|>\n"
        f"<|im_start|>assistant\n«7 {START}»<|endoftext|><|endoftext|>«{END}<|im_end|>»\n",
    ),
]


@pytest.mark.parametrize(("name", "messages", "rows", "truth"), TRUTHS)
def test_start_and_end_of_an_output_item_count_and_nothing_of_the_template_is_there(
    opened: Open,
    tmp_path: Path,
    name: str,
    messages: list[dict[str, Any]],
    rows: list[int],
    truth: str,
) -> None:
    chat = opened(name)
    ids, counts = tokens_of(with_tokens(chat, tmp_path), truth)
    sample = chat.encode(messages, rows, "k")
    assert chat.text(sample.input_ids) == chat.text(ids)
    assert sample.input_ids.tolist() == ids
    assert [False, *(sample.loss_mask[:-1] == 1).tolist()] == counts
    np.testing.assert_array_equal(sample.labels[:-1], sample.input_ids[1:])
    assert sample.item_rows.tolist() == rows
    again = pickle.loads(pickle.dumps(chat)).encode(messages, rows, "k")
    assert again.input_ids.tolist() == ids


def test_answers_that_are_found_by_rendering_have_outputs_too(opened: Open) -> None:
    chat = opened("closed")
    # This template joins texts alone, so the item is the whole content.
    turns = [user("a few"), {"role": "assistant", "content": [IMAGE]}]
    sample = chat.encode([*turns, *turns], [2, 2], "k")
    learned = sample.labels[sample.loss_mask == 1].tolist()
    start, end = chat.output_ids["output.image"]
    assert learned == [start, end, chat.eos_token_id] * 2


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "digits"])
def test_a_prompt_is_the_beginning_of_the_finished_chat(opened: Open, name: str) -> None:
    chat, turns = opened(name), [user("draw"), answer("3", IMAGE), user("read", IMAGE)]
    prompt = chat.encode_prompt(turns, [4, 2])
    whole = chat.encode([*turns, answer("7")], [4, 2], "k")
    np.testing.assert_array_equal(prompt.input_ids, whole.input_ids[: len(prompt.input_ids)])
    assert prompt.item_offsets.tolist() == whole.item_offsets.tolist()
    assert not prompt.loss_mask.any()


# ------------------------------------------------------------------ conditions


def test_a_prompt_condition_is_what_stands_before_an_item_since_the_one_before_it(
    opened: Open,
) -> None:
    chat = opened("digits", PROMPT)
    messages = [user(IMAGE, "3 7"), answer("4", IMAGE, IMAGE, "5 6", IMAGE), user("9")]
    messages += [answer(IMAGE)]
    with pytest.raises(MessagesError, match=r"sample 'k': item 2 has no condition: .*skipped_tok"):
        chat.encode(messages, [2, 0, 0, 0, 0], "k")
    messages[1] = answer("4", IMAGE, "5 6", IMAGE)
    sample = chat.encode(messages, [2, 0, 0, 0], "k")
    start, end = (np.flatnonzero(sample.input_ids == i) for i in chat.output_ids["output.image"])
    assert (end - start).tolist() == [1, 1, 1]
    assert sample.item_offsets[1:].tolist() == [3, end[0] + 1, end[1] + 1]
    assert (sample.item_offsets + sample.item_rows)[1:].tolist() == start.tolist()
    # Between start and end there is nothing: the start token predicts the end.
    assert sample.loss_mask[start].tolist() == [1, 1, 1]
    assert (sample.labels[start] == sample.input_ids[end]).all()


@pytest.mark.parametrize(("skipped", "rows"), [(0, 6), (5, 1), (6, None), (90, None)])
def test_skipped_tokens_are_in_no_condition(opened: Open, skipped: int, rows: int | None) -> None:
    chat = opened("digits", OutputText(START, END, skipped))
    messages = [user("9"), answer(IMAGE)]
    prompt = "<|im_start|> user 9 <|im_end|> <|im_start|> assistant"
    assert chat.text(chat.encode_prompt(messages[:1], []).input_ids) == prompt
    if rows is None:
        with pytest.raises(MessagesError, match="item 0 has no condition"):
            chat.encode(messages, [0], "k")
        return
    sample = chat.encode(messages, [0], "k")
    assert (sample.item_offsets.tolist(), sample.item_rows.tolist()) == ([skipped], [rows])


def test_chats_with_an_item_get_the_system_message_of_its_generator_unless_they_have_one(
    opened: Open,
) -> None:
    chat = opened("digits", OutputText(START, END, 4, most_rows=6, system="read"))
    before, asked = {"role": "system", "content": "see"}, user("9")
    prompt = "<|im_start|> {} <|im_end|> <|im_start|> user 9 <|im_end|> <|im_start|> assistant"
    for messages, text in (([asked], "system read"), ([before, asked], "system see")):
        expected = prompt.format(text)
        assert chat.text(chat.encode_prompt(messages, []).input_ids) == expected
        drawn = chat.encode([*messages, answer(IMAGE)], [0], "k")
        assert chat.text(drawn.input_ids).startswith(expected)
        # The condition begins after the system message.
        assert (drawn.item_offsets.tolist(), drawn.item_rows.tolist()) == ([4], [6])
    assert "system" not in chat.text(chat.encode([asked, answer("3")], [], "k").input_ids)
    with pytest.raises(MessagesError, match="condition of 7 tokens, but its generator takes 6"):
        chat.encode([user("9 3"), answer(IMAGE)], [0], "k")


# ------------------------------------------------------------------ modalities


def test_without_an_encoder_only_answers_have_images(folders: dict[str, Path]) -> None:
    chat = ChatTokenizer(folders["qwen3_vl"], {}, {"output.image": QUERIES})
    mentioned = chat.mentions([user("draw"), answer(IMAGE)], "k")
    assert [mention.media for mention in mentioned] == ["output.image"]
    with pytest.raises(UnknownMediaError, match="of type 'image', but there are encoders for not"):
        chat.mentions([user(IMAGE), answer(IMAGE)], "k")
    inputs = ChatTokenizer(folders["qwen3_vl"], {}, {})
    with pytest.raises(UnknownMediaError, match="'image' in an assistant's message, but .*a gener"):
        inputs.mentions([user("draw"), answer(IMAGE)], "k")


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_message_cannot_name_an_output_modality(opened: Open, role: str) -> None:
    message = {**user({"type": "output.image"}), "role": role}
    with pytest.raises(UnknownMediaError, match=r"of type 'output\.image'"):
        opened("digits").mentions([user("9"), message], "k")


def test_a_text_with_the_mark_of_an_output_is_refused(opened: Open) -> None:
    with pytest.raises(MessagesError, match="U\\+FDD0 to U\\+FDD2"):
        opened("digits").encode([user("9"), answer("\ufdd2output.image\ufdd2")], [], "k")


# ------------------------------------------------------------------ random chats

WORDS = st.sampled_from(["3", "7 ", " digit", START, END, "<|image_pad|>", "<|vision_start|>", "?"])
PARTS = st.lists(st.one_of(WORDS, st.just(IMAGE)), max_size=4)
TURNS = st.lists(st.tuples(PARTS, PARTS), min_size=1, max_size=3)


@given(turns=TURNS, rows=st.integers(1, 3), queries=st.integers(0, 3))
@settings(deadline=None)
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "digits"])
def test_random_chats_have_each_item_in_its_place(
    opened: Open, name: str, turns: list[tuple[list[Any], list[Any]]], rows: int, queries: int
) -> None:
    chat = opened(name)
    messages = [
        role(*contents, "")  # never a single text, which would not be parts
        for question, reply in turns
        for role, contents in ((user, question), (answer, reply))
    ]
    is_output = [
        number % 2 == 1
        for number, contents in enumerate(part for turn in turns for part in turn)
        for content in contents
        if content == IMAGE
    ]
    sample = chat.encode(messages, [queries if out else rows for out in is_output], "k")
    check(chat, sample, is_output, rows, queries)
    fewest = chat.encode(messages, [0 if out else 1 for out in is_output], "k")
    num_outputs = sum(is_output)
    more = (len(is_output) - num_outputs) * (rows - 1) + num_outputs * queries
    assert len(sample.input_ids) == len(fewest.input_ids) + more
    assert sample.loss_mask.sum() == fewest.loss_mask.sum()
    learned, same = (s.labels[s.loss_mask == 1].tolist() for s in (sample, fewest))
    assert learned == same
    check_conditions(
        opened(name, OutputText(START, END, 0)), messages, is_output, rows, fewest.input_ids
    )


def check_conditions(
    chat: ChatTokenizer,
    messages: Sequence[dict[str, Any]],
    is_output: Sequence[bool],
    rows: int,
    ids: np.ndarray,
) -> None:
    """Conditions follow each other, with start and end tokens between them."""
    start, end = chat.output_ids["output.image"]
    counts = [0 if out else rows for out in is_output]
    starts, ends = (np.flatnonzero(ids == token) for token in (start, end))
    if np.isin(starts, ends + 1).any():
        with pytest.raises(MessagesError, match="has no condition"):
            chat.encode(messages, counts, "k")
        return
    sample = chat.encode(messages, counts, "k")
    outputs = np.array(is_output, bool)
    first, count = sample.item_offsets[outputs], sample.item_rows[outputs]
    starts, ends = (np.flatnonzero(sample.input_ids == token) for token in (start, end))
    assert (first + count).tolist() == starts.tolist()
    assert first.tolist() == [0, *(ends + 1)][: len(first)]
    assert sample.item_rows[~outputs].tolist() == [rows] * int((~outputs).sum())


def check(
    chat: ChatTokenizer, sample: EncodedSample, is_output: Sequence[bool], rows: int, queries: int
) -> None:
    start, end = chat.output_ids["output.image"]
    assert (sample.input_ids == start).sum() == (sample.input_ids == end).sum() == sum(is_output)
    placeholder = chat.placeholder_ids["image"]
    assert (sample.input_ids == placeholder).sum() == rows * (len(is_output) - sum(is_output))
    assert not np.isin(sample.labels[sample.loss_mask == 1], placeholder).any()
    assert (np.diff(sample.item_offsets) > 0).all()
    counts = np.append(False, sample.loss_mask[:-1] == 1)
    places = zip(is_output, sample.item_offsets.tolist(), sample.item_rows.tolist(), strict=True)
    for output, first, count in places:
        inside = slice(first, first + count)
        assert count == (queries if output else rows)
        assert not counts[inside].any()
        if output:
            assert (sample.input_ids[inside] == chat.pad_token_id).all()
            assert sample.input_ids[[first - 1, first + count]].tolist() == [start, end]
            assert counts[[first - 1, first + count]].all()
        else:
            assert (sample.input_ids[inside] == placeholder).all()
