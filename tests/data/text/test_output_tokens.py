"""Tokens that mark items of answers: where a tokenizer lacks them, and their order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data.text.chat import ChatTokenizer
from data.text.messages import MessagesError
from data.text.outputs import OutputText
from tests.data.text.conftest import (
    CLIP,
    END,
    IMAGE,
    PROMPT,
    QUERIES,
    START,
    Open,
    answer,
    with_tokens,
)
from tests.data.text.test_label_masks import user


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "digits"])
def test_missing_tokens_are_added_after_the_last_and_always_alike(
    opened: Open, tmp_path: Path, name: str
) -> None:
    chat, plain = opened(name), ChatTokenizer(opened(name).directory, {})
    assert chat.added_tokens == (START, END)
    assert chat.output_ids == {"output.image": (plain.vocab_size, plain.vocab_size + 1)}
    assert chat.vocab_size == plain.vocab_size + 2
    assert plain.added_tokens == ()
    tokenizer = with_tokens(chat, tmp_path)
    assert tokenizer.added_tokens == ()
    assert (tokenizer.vocab_size, tokenizer.output_ids) == (chat.vocab_size, chat.output_ids)
    assert not chat.differences(ChatTokenizer(chat.directory, chat.media_text, chat.outputs))


def test_a_token_of_the_vocabulary_keeps_its_id_and_becomes_special(
    opened: Open, folders: dict[str, Path]
) -> None:
    chat = opened("digits", OutputText("follows", "repeat"))
    before = ChatTokenizer(folders["digits"])
    ids = [before._backend.token_to_id(token) for token in ("follows", "repeat")]
    assert chat.added_tokens == ()
    assert [*chat.output_ids["output.image"]] == ids
    sample = chat.encode([user("9"), answer(IMAGE)], [1], "k")
    assert np.isin(sample.input_ids, ids).sum() == 2
    with pytest.raises(MessagesError, match="a text looks like a special token"):
        chat.encode([user("what follows ?"), answer(IMAGE)], [1], "k")


def test_several_modalities_get_their_tokens_in_order_and_keep_apart(
    folders: dict[str, Path],
) -> None:
    outputs = {
        "output.clip": OutputText("<clip>", "</clip>"),
        "output.image": OutputText("<picture>", "</picture>", 0),
    }
    chat = ChatTokenizer(folders["qwen3_vl"], {}, outputs)
    assert chat.added_tokens == ("<clip>", "</clip>", "<picture>", "</picture>")
    sample = chat.encode([user("a"), answer(IMAGE, CLIP, "b", IMAGE)], [0, 2, 0], "k")
    text = chat.text(sample.input_ids)
    pad = "<|endoftext|>" * 2
    assert text.endswith(
        f"assistant\n<picture></picture><clip>{pad}</clip>b<picture></picture><|im_end|>\n"
    )
    clip = chat.output_ids["output.clip"]
    assert sample.item_offsets[1] == np.flatnonzero(sample.input_ids == clip[0]) + 1
    # The second image is conditioned on what follows the clip.
    assert sample.item_offsets[2] == np.flatnonzero(sample.input_ids == clip[1]) + 1
    assert sample.item_rows.tolist()[1:] == [2, 1]


def test_a_tokenizer_whose_ids_have_gaps_gets_no_token_over_another(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "gaps").mkdir()
    for file in folders["digits"].iterdir():
        (tmp_path / "gaps" / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "gaps" / "tokenizer.json"
    document = json.loads(file.read_text())
    words = document["model"]["vocab"]
    words[max(words, key=words.__getitem__)] += 40
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"leaves out ids below \d+, so .*name start"):
        ChatTokenizer(tmp_path / "gaps", {}, {"output.image": QUERIES})


def test_the_fingerprint_follows_tokens_and_conditions(opened: Open) -> None:
    chats = [
        opened("digits", output)
        for output in (
            QUERIES,
            PROMPT,
            OutputText(START, END, 4),
            OutputText(START, "<|end|>"),
            OutputText("follows", "repeat"),
            OutputText("repeat", "follows"),
        )
    ]
    prints = [chat.fingerprint() for chat in chats]
    prints.append(ChatTokenizer(chats[0].directory).fingerprint())
    assert len(set(prints)) == len(prints)
    assert opened("digits").fingerprint() == prints[0]
