from __future__ import annotations

import errno
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data.index.build import Problems
from data.index.samples import Processors, check_sizes
from data.index.shard_index import COLUMNS
from data.text.chat import ChatTokenizer
from examples.digits.scans import CANVASES
from tests.data.conftest import build_index


def test_offsets_point_at_the_members_of_the_tar(
    digits: Path, chat: ChatTokenizer, processors: Processors
):
    index = build_index(str(digits / "train-*.tar"), chat, processors)
    assert len(index) == 96
    assert index.num_skipped == 0
    with tarfile.open(index.shards[0]) as tar:
        members = {m.name: (m.offset_data, m.size) for m in tar}
    for i, key in enumerate(map(index.key, range(len(index)))):
        place = (index.column("json_offset", i), index.column("json_size", i))
        assert members[f"{key}.json"] == place
        for number, item in enumerate(index.items_of_sample(i)):
            file = index.column("item_file", item)
            place = (index.column("file_offset", file), index.column("file_size", file))
            assert members[f"{key}.{number}.png"] == place
            assert index.sample_of_item(item) == i


def test_dtypes_and_lengths_are_as_documented(
    digits: Path, chat: ChatTokenizer, processors: Processors
):
    index = build_index(str(digits / "test-*.tar"), chat, processors)
    lengths = {
        "samples": len(index),
        "items": index.num_items,
        "files": len(index.column("file_size")),
    }
    for name, of in COLUMNS.items():
        if of != "bytes":
            column = index.column(name)
            assert column.dtype == (np.float64 if name == "item_fps" else np.int64)
            assert len(column) == lengths[of] + (name == "item_start")
    assert index.column("shard").tolist() == [0] * len(index)
    parts = [index.part(item) for item in range(index.num_items)]
    rows = [processors["image"].plan(part).num_rows for part in parts]
    assert {part.size for part in parts} <= set(CANVASES)
    assert index.column("item_rows").tolist() == rows
    assert index.media == ("image",)
    assert index.column("item_media").tolist() == [0] * index.num_items


def test_items_of_the_last_sample_are_its_own_however_many_there_are(index_of, ask, make_image):
    picture, members = make_image(), {}
    for sample, count in enumerate((200, 55, 3)):
        members |= {f"{sample}.json": ask(count)}
        members |= {f"{sample}.{number}.png": picture for number in range(count)}
    index = index_of(members)
    found = [index.sample_of_item(item) for item in range(index.num_items)]
    assert found == [0] * 200 + [1] * 55 + [2] * 3


def test_unusable_samples_are_left_out_and_listed_with_their_reason(
    tmp_path: Path, index_of, ask, make_image
):
    picture = make_image(28, 56)
    index = index_of(
        {
            "README": b"not a sample",
            "dir.v2/good.json": ask(2),
            "dir.v2/good.1.jpg": make_image(56, 56, "JPEG"),
            "dir.v2/good.0.png": picture,
            "dir.v2/good.txt": b"ignored",
            "no-messages.json": b"[1]",
            "bad-role.json": b'{"messages": [{"content": "hi"}]}',
            "long.json": ask(1),
            "long.0.png": make_image(1000, 2),
            "no-answer.json": b"""{"messages": [
                {"role": "user", "content": "1"}, {"role": "bot", "content": "1"},
                {"role": "user", "content": "2"}]}""",
            "last.json": ask(0),
        },
    )
    assert [*map(index.key, range(len(index)))] == ["dir.v2/good", "last"]
    assert index.column("item_start").tolist() == [0, 2, 2]
    assert index.column("item_size_0").tolist() == [28, 56]
    assert index.column("item_rows").tolist() == [2, 4]
    reasons = {skipped.key: skipped.reason for skipped in index.skipped_samples()}
    assert {skipped.shard for skipped in index.skipped_samples()} == {str(tmp_path / "a.tar")}
    for key, reason in {
        "no-messages": "[1] is no chat; need one of these forms:",
        "bad-role": "without a role",
        "long": "aspect ratio",
        "no-answer": "no message of the assistant, so nothing to learn (its roles are 'user'",
    }.items():
        assert reason in reasons.pop(key)
    assert not reasons


# Joins text with text: content parts raise TypeError. Drops a question that says "forget".
JOINING = """{%- for m in messages -%}
{{ m.role + ' ' }}
{%- if not (messages[-1].role == 'assistant' and m.content == 'forget') -%}
{{ m.content + '<|im_end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant ' }}{%- endif -%}"""


def test_one_odd_sample_is_left_out_and_the_others_are_indexed(
    tmp_path: Path, chat: ChatTokenizer, index_of, ask, make_image
):
    def chatting(question: object) -> bytes:
        messages = [("user", question), ("assistant", "3")]
        return json.dumps(
            {"messages": [{"role": role, "content": text} for role, text in messages]}
        ).encode()

    shutil.copytree(chat.directory, tmp_path / "joining")
    (tmp_path / "joining" / "chat_template.jinja").write_text(JOINING)
    members = {
        "good.json": chatting("read"),
        "half.json": chatting("read \ud83d"),
        "texts.json": ask(0),
        "parts.json": ask(1),
        "parts.0.png": make_image(),
        "rewritten.json": chatting("forget"),
        "last.json": chatting("write"),
    }
    index = index_of(members, ChatTokenizer(tmp_path / "joining"))
    # A content that is all text is a text to a template that takes no parts.
    assert [*map(index.key, range(len(index)))] == ["good", "texts", "last"]
    reasons = {skipped.key: skipped.reason for skipped in index.skipped_samples()}
    assert sorted(reasons) == ["half", "parts", "rewritten"]
    assert "no lone surrogate" in reasons["half"]
    assert "cannot be rendered (TypeError" in reasons["parts"]
    assert "renders the messages before answer 1 differently" in reasons["rewritten"]


def test_items_of_a_modality_without_an_encoder_are_listed_with_the_known_ones(
    tmp_path: Path, chat: ChatTokenizer, index_of, ask, make_image
):
    members = {
        "film.json": ask(["image", "video"]),
        "film.0.png": make_image(),
        "film.1.png": make_image(),
        "short.json": ask(2),
    }
    shard = tmp_path / "a.tar"
    with pytest.raises(ValueError, match="1 samples have items of a modality") as e:
        index_of(members)
    assert f"{shard}: film: video" in str(e.value)
    assert "the encoders take image;" in str(e.value)
    assert f"{shard}: short: 2 / 0" in str(e.value)  # reported together
    no_encoder = ChatTokenizer(chat.directory, {})
    with pytest.raises(ValueError, match="the encoders take none"):
        index_of(members, no_encoder, {})


def test_a_failing_file_system_is_the_cause_only_if_nothing_else_is_wrong(
    processors: Processors,
) -> None:
    def cause(*problems: tuple[str, BaseException | None]) -> BaseException | None:
        found = Problems()
        for kind, one in problems:
            found.add(kind, "a.tar: so", one)
        with pytest.raises(ValueError, match=r"a\.tar: so") as error:
            found.raise_any(processors)
        return error.value.__cause__

    stale, forbidden = OSError(errno.ESTALE, ""), OSError(errno.EACCES, "")
    assert cause(("shard", stale), ("shard", stale)) is stale
    assert cause(("shard", stale), ("shard", None)) is None, "the other is damaged"
    assert cause(("shard", forbidden), ("shard", stale)) is None
    assert cause(("shard", stale), ("unknown", None)) is None
    Problems().raise_any(processors)


def test_tokens_that_stand_for_unknown_text_are_counted_by_sample_and_source(
    tmp_path: Path, chat: ChatTokenizer, processors: Processors, write_shard, ask, make_image
):
    members = {"a.0.png": make_image(), "a.json": ask(1), "b.json": ask(0, "zwei 7 drei !")}
    write_shard(tmp_path / "one.tar", members)
    write_shard(tmp_path / "two.tar", {"c.json": ask(0, "quatre")})
    index = build_index(str(tmp_path / "*.tar"), chat, processors)
    assert index.column("unknown_tokens").tolist() == [0, 3, 1]
    text = int(index.column("token_length").sum() - index.column("item_rows").sum())
    assert index.unknown_share == 4 / text
    assert build_index(str(tmp_path / "two.tar"), chat, processors).unknown_share > 0.05


def test_samples_with_too_many_tokens_or_rows_are_listed(
    digits: Path, chat: ChatTokenizer, processors: Processors
):
    index = build_index(str(digits / "train-*.tar"), chat, processors)
    tokens = index.column("token_length")
    items = (np.array(index.items_of_sample(n), int) for n in range(96))
    rows = np.array([index.column("item_rows", own).sum() for own in items])
    check_sizes(index, int(tokens.max()), int(rows.max()))
    for unit, sizes, limits in (
        ("longer than sequence_length", tokens, (int(tokens.max()) - 1, None)),
        ("more rows than rows_per_microbatch", rows, (10**9, int(rows.max()) - 1)),
    ):
        count = (sizes == sizes.max()).sum()
        with pytest.raises(ValueError, match=rf"{count} of 96 samples .* {unit} {sizes.max() - 1}"):
            check_sizes(index, *limits)
    with pytest.raises(ValueError, match="and 86 more"):
        check_sizes(index, 1, None)
