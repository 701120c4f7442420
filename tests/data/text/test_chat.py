from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.text.chat import ChatTokenizer
from data.text.digits import write_tokenizer
from data.text.messages import MediaText, MessagesError, PlaceholderError


def user(text: str, num_images: int = 0) -> dict[str, Any]:
    images = [{"type": "image"}] * num_images
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def learned(chat: ChatTokenizer, ids: np.ndarray) -> list[str]:
    return [chat._tokenizer.convert_ids_to_tokens(int(token)) for token in ids]


def copy_with_template(chat: ChatTokenizer, folder: Path, template: str) -> ChatTokenizer:
    shutil.copytree(chat.directory, folder)
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


def test_a_folder_without_a_model_opens_as_by_transformers(chat: ChatTokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(chat.directory))
    assert type(chat._tokenizer) is type(theirs)
    assert chat._tokenizer.special_tokens_map == theirs.special_tokens_map
    assert chat._backend.to_str() == theirs.backend_tokenizer.to_str()


def test_each_placeholder_becomes_as_many_ids_as_its_image_has_rows(chat: ChatTokenizer):
    messages = [user("read the digits .", num_images=3), assistant("3 7 1")]
    short = chat.encode(messages, [1, 1, 1], "k")
    sample = chat.encode(messages, [4, 1, 2], "k")
    assert len(sample.input_ids) == len(short.input_ids) + 4
    assert sample.item_offsets.tolist() == [3, 9, 12]
    is_image = np.flatnonzero(sample.input_ids == chat.placeholder_ids["image"])
    assert is_image.tolist() == [3, 4, 5, 6, 9, 12, 13]


def test_labels_are_the_next_tokens_and_the_mask_covers_the_answer_with_its_end(
    chat: ChatTokenizer,
):
    sample = chat.encode([user("what digit is this ?", 1), assistant("7")], [2], "k")
    assert (sample.input_ids.dtype, sample.labels.dtype) == (np.int64, np.int64)
    assert (sample.loss_mask.dtype, sample.item_offsets.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(sample.labels[:-1], sample.input_ids[1:])
    assert sample.labels[-1] == chat.pad_token_id
    assert learned(chat, sample.labels[sample.loss_mask == 1]) == ["7", "<|im_end|>"]


def test_a_prompt_is_the_beginning_of_the_finished_conversation(chat: ChatTokenizer):
    messages = [user("what digits are these ?", 2), assistant("7 0")]
    prompt, whole = chat.encode_prompt(messages[:1], [1, 4]), chat.encode(messages, [1, 4], "k")
    length = len(prompt.input_ids)
    np.testing.assert_array_equal(prompt.input_ids, whole.input_ids[:length])
    np.testing.assert_array_equal(prompt.item_offsets, whole.item_offsets)
    assert whole.loss_mask[: length - 1].sum() == 0
    assert whole.loss_mask[length - 1] == 1  # the last token of the prompt predicts the answer
    assert prompt.loss_mask.sum() == 0
    assert (prompt.labels == chat.pad_token_id).all()


def test_a_prompt_that_already_has_its_answer_is_refused(chat: ChatTokenizer):
    with pytest.raises(MessagesError, match="leave the answer out"):
        chat.encode_prompt([user("what digit is this ?"), assistant("7")], [])


@pytest.mark.parametrize(("placeholders", "images"), [(2, 1), (0, 1), (1, 0)])
def test_more_or_fewer_placeholders_than_images_names_sample_and_both_counts(
    chat: ChatTokenizer, placeholders: int, images: int
):
    message = f"'shelf/12' has {placeholders} placeholders but {images} items"
    with pytest.raises(PlaceholderError, match=message):
        chat.encode([user("read", placeholders), assistant("1")], [1] * images, "shelf/12")


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        [{"content": "no role"}],
        ["hello"],
        [{"role": "user"}],
        [{"role": "user", "content": [{"kind": "image"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["hello"]}],
    ],
)
def test_malformed_messages_name_the_sample_and_show_the_right_form(
    chat: ChatTokenizer, messages: Any
):
    with pytest.raises(MessagesError, match=r"sample 'k': .*need a list such as"):
        chat.encode(messages, [], "k")


def test_a_conversation_that_begins_with_an_answer_is_refused(chat: ChatTokenizer):
    with pytest.raises(MessagesError, match="sample 'k': begins with an answer"):
        chat.encode([assistant("7"), user("write 3 .")], [], "k")


def test_a_tokenizer_without_the_placeholder_is_refused(chat: ChatTokenizer):
    with pytest.raises(ValueError, match=r"no token '<\|picture\|>' for the image placeholder"):
        ChatTokenizer(chat.directory, {"image": MediaText("<|picture|>")})


def test_a_folder_without_tokenizer_or_template_is_refused(chat: ChatTokenizer, tmp_path: Path):
    with pytest.raises(ValueError, match="missing does not exist"):
        ChatTokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match="no tokenizer can be loaded"):
        ChatTokenizer(tmp_path)
    shutil.copytree(chat.directory, tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"chat template: add chat_template\.jinja"):
        ChatTokenizer(tmp_path / "bare")


def test_a_tokenizer_that_leaves_ids_out_needs_room_for_its_highest(
    chat: ChatTokenizer, tmp_path: Path
):
    shutil.copytree(chat.directory, tmp_path / "gaps")
    path = tmp_path / "gaps" / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    last = max(vocabulary, key=lambda word: vocabulary[word])
    vocabulary[last] += 40
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] != last]
    path.write_text(json.dumps(document))
    gaps = ChatTokenizer(tmp_path / "gaps")
    assert gaps.vocab_size == chat.vocab_size + 40


def test_the_fingerprint_follows_the_template_and_not_the_folder(
    chat: ChatTokenizer, tmp_path: Path
):
    template = (chat.directory / "chat_template.jinja").read_text()
    same = copy_with_template(chat, tmp_path / "same", template)
    other = copy_with_template(chat, tmp_path / "other", template + " ")
    assert same.fingerprint() == chat.fingerprint() != other.fingerprint()
    more = ChatTokenizer(chat.directory, {**chat.media_text, "video": MediaText("<|video_pad|>")})
    assert more.fingerprint() != chat.fingerprint()


def test_a_written_tokenizer_has_the_placeholders_it_is_given(tmp_path: Path) -> None:
    placeholders = {"an 'odd' \"media\"": "<image_soft_token>", "video": "<|video_pad|>"}
    write_tokenizer(tmp_path, placeholders)
    chat = ChatTokenizer(tmp_path, {m: MediaText(token) for m, token in placeholders.items()})
    content = [{"type": "video"}, {"type": "an 'odd' \"media\""}, {"type": "text", "text": "3"}]
    sample = chat.encode([{"role": "user", "content": content}, assistant("7")], [1, 3], "k")
    odd, video = chat.placeholder_ids["an 'odd' \"media\""], chat.placeholder_ids["video"]
    kinds = [token for token in sample.input_ids.tolist() if token in (odd, video)]
    assert kinds == [video, odd, odd, odd]


def test_answers_end_where_the_model_says_or_a_turn_ends(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    chat = ChatTokenizer(tmp_path)
    assert chat.stop_token_ids == {chat.eos_token_id}
    config = tmp_path / "generation_config.json"
    for given, more in ((3, {3}), ([3, chat.eos_token_id], {3}), (None, set())):
        config.write_text(json.dumps({"eos_token_id": given}))
        assert ChatTokenizer(tmp_path).stop_token_ids == {chat.eos_token_id} | more
    config.write_text("[")
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read"):
        ChatTokenizer(tmp_path)
