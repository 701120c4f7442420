"""Chats in the forms of others become ours, and what is of no form is refused with examples."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from data.text.forms import Embedded, parse_messages, read_chat

IMAGE = {"type": "image"}
PIXEL = base64.b64encode(b"pixels").decode()


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": parts[0] if isinstance(parts[0], str) else list(parts)}


def llava(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": said} for who, said in turns], **more}


def call(arguments: object, **more: str) -> dict[str, Any]:
    return {**more, "type": "function", "function": {"name": "look", "arguments": arguments}}


YES = {"role": "assistant", "content": "yes"}
ASK = ("human", "<image>\nsee?")
GPT = ("gpt", "yes")
TWO = {"image": ["a.jpg", "b.jpg"]}
URL = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
SOUND = {"type": "input_audio", "input_audio": {"data": PIXEL, "format": "wav"}}

CHATS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[Any]]] = {
    "ours": (
        {"messages": [user(IMAGE, text("<image>?")), YES], "images": 1},
        [user(IMAGE, text("<image>?")), YES],
        [None],
    ),
    "ours, with files": (
        {"messages": [user({**IMAGE, "image": "b"}, IMAGE), YES], "images": ["a"]},
        [user(IMAGE, IMAGE), YES],
        ["b", "a"],
    ),
    "ours, as Parquet fills it up": (
        {"messages": [user({**IMAGE, "text": None}, {**text("?"), "index": None}), YES]},
        [user(IMAGE, text("?")), YES],
        [None],
    ),
    "LLaVA": (
        llava(("system", "be kind"), ASK, GPT, ("human", "and <image>, <image>?"), GPT)
        | {"images": ["a", "b", {"bytes": b"x", "path": None}], "id": 7},
        [
            {"role": "system", "content": "be kind"},
            user(IMAGE, text("\nsee?")),
            YES,
            user(text("and "), IMAGE, text(", "), IMAGE, text("?")),
            YES,
        ],
        ["a", "b", {"bytes": b"x", "path": None}],
    ),
    "LLaVA in a shard": (llava(ASK, GPT), [user(IMAGE, text("\nsee?")), YES], [None]),
    "LLaVA, one image": (
        llava(ASK, GPT, image="a.jpg"),
        [user(IMAGE, text("\nsee?")), YES],
        ["a.jpg"],
    ),
    "LLaVA without tokens": (
        llava(("human", "see?"), GPT, **TWO),
        [user(IMAGE, IMAGE, text("see?")), YES],
        ["a.jpg", "b.jpg"],
    ),
    "LLaVA of text": (llava(("human", "1 < 2?"), GPT), [user("1 < 2?"), YES], []),
    "LLaVA of a video": (
        llava(("human", "<video>?"), GPT, video=["0.jpg", "1.jpg"], fps=4),
        [user({"type": "video", "frames": 2, "fps": 4}, text("?")), YES],
        ["0.jpg", "1.jpg"],
    ),
    "ShareGPT with a tool": (
        llava(
            ("human", "look"),
            ("function_call", '{"name": "look", "arguments": {"at": 1}}'),
            ("observation", "a cat"),
            ("gpt", "yes"),
            tools='[{"name": "look"}]',
        ),
        [
            {**user("look"), "tools": [{"name": "look"}]},
            {"role": "assistant", "content": "", "tool_calls": [call({"at": 1})]},
            {"role": "tool", "content": "a cat"},
            YES,
        ],
        [],
    ),
    "roles and images": (
        {"messages": [user("<image>see?"), YES], "images": ["a"]},
        [user(IMAGE, text("see?")), YES],
        ["a"],
    ),
    "LLaVA's roles in messages": (
        {
            "messages": [
                {"role": "human", "content": "see?"},
                {"role": "gpt", "content": "yes"},
                {"role": "observation", "content": "a cat"},
            ],
            "images": ["a"],
        },
        [user(IMAGE, text("see?")), YES, {"role": "tool", "content": "a cat"}],
        ["a"],
    ),
    "messages inside a text": (
        {"messages": json.dumps([user("<image>?"), YES])},
        [user("<image>?"), YES],
        [],
    ),
    "OpenAI": (
        {"messages": [{"role": "developer", "content": "hi"}, user(text("see"), URL, SOUND), YES]},
        [{"role": "system", "content": "hi"}, user(text("see"), IMAGE, {"type": "audio"}), YES],
        [Embedded(PIXEL), Embedded(PIXEL)],
    ),
    "OpenAI's tools": (
        {
            "messages": [
                user("look"),
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [call('{"at": null}', id="1")],
                },
                {"role": "tool", "tool_call_id": "1", "content": "a cat"},
                YES,
            ],
            "tools": [{"type": "function", "function": {"name": "look"}}],
        },
        [
            {**user("look"), "tools": [{"type": "function", "function": {"name": "look"}}]},
            {"role": "assistant", "content": "", "tool_calls": [call({"at": None}, id="1")]},
            {"role": "tool", "tool_call_id": "1", "content": "a cat"},
            YES,
        ],
        [],
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_of_any_form_becomes_ours_with_its_files_in_order_of_mention(name: str):
    document, messages, files = CHATS[name]
    before = json.dumps(document, default=repr)
    chat = read_chat(document)
    assert (chat.messages, chat.files, chat.left) == (messages, files, [])
    assert json.dumps(document, default=repr) == before, "the document is left as it was"


@pytest.mark.parametrize("name", [name for name in CHATS if name != "OpenAI"])
def test_a_shard_may_have_a_chat_of_any_form(name: str):
    document, messages, _ = CHATS[name]
    data = json.dumps(document, default=lambda _: "bytes").encode()
    assert parse_messages(data) == messages


def test_a_file_inside_the_json_of_a_shard_is_refused():
    with pytest.raises(ValueError, match="a file inside its JSON: `mimo data pack` writes"):
        parse_messages(json.dumps({"messages": [user(URL), YES]}).encode())


@pytest.mark.parametrize(
    "document", [None, [1], "hello", {"text": "a"}, {"messages": 1}, {"conversations": "[1]x"}]
)
def test_what_is_of_no_form_is_refused_with_an_example_of_each(document: Any):
    with pytest.raises(ValueError, match="is no chat|is a text that is not JSON") as e:
        parse_messages(json.dumps(document).encode())
    if "no chat" in str(e.value):
        for word in ('{"type": "image"}', '"conversations"', '"image_url"'):
            assert word in str(e.value)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (llava(("bot?", "hi")), """is "from" 'bot\\?'; need one of"""),
        (
            {"conversations": [{"from": ["gpt"], "value": "hi"}]},
            """is "from" \\['gpt'\\]; need one of""",
        ),
        (llava(ASK, GPT, **TWO), "has <image> 1 times for 2 files"),
        (llava(("human", "<video>"), GPT, video="a.mp4"), "'a.mp4': .* the list of its frames"),
        (llava(("human", "<video>"), GPT, videos=["a.mp4"]), "'a.mp4': .* videos are not decoded"),
        (llava(("human", "a"), ("function_call", "{")), "a function_call is a text that is not"),
        (llava(("human", "a"), ("function_call", "[1]")), "the call 1: need"),
        ({"messages": [{**YES, "tool_calls": [call("[1]")]}]}, "the call {.*: need"),
        ({"messages": [user({**URL, "image_url": "data:text/plain,a"})]}, "need data:<type>;base"),
    ],
)
def test_a_chat_that_contradicts_itself_is_refused_with_the_reason(document: Any, reason: str):
    with pytest.raises(ValueError, match=reason):
        read_chat(document)


def test_files_that_no_message_mentions_are_told():
    document = {"messages": [user(IMAGE), YES], "images": ["a", "b"], "videos": [["c"]]}
    assert read_chat(document).left == ["image", "video"]


def test_a_chat_that_mentions_very_many_files_is_refused_at_once():
    video = {"type": "video", "frames": 2**20}
    with pytest.raises(ValueError, match="mentions more than 65536 files"):
        parse_messages(json.dumps({"messages": [user(*[video] * 60), YES]}).encode())
