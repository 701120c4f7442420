"""Chats through a checkpoint's own files have the ids that transformers' processors give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import Qwen2_5_VLProcessor

from data.modalities.processor import Part
from data.text.chat import ChatTokenizer
from data.text.digits import write_tokenizer
from data.text.messages import MediaText, MessagesError
from tests.data.checkpoint_files import GEMMA_IMAGE, hf_processor, our_processor, write_folder

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")
SIZES = [(60, 40), (31, 57), (90, 30)]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: write_folder(family, root / family) for family in FAMILIES}


def open_chat(family: str, folder: Path) -> ChatTokenizer:
    return ChatTokenizer(
        folder, {"image": GEMMA_IMAGE if family == "gemma3" else MediaText("<|image_pad|>")}
    )


def image(number: int) -> dict[str, Any]:
    width, height = SIZES[number]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return {"type": "image", "image": Image.fromarray(pixels)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def answer(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [text(words)]}


SEE = text("what is this ?")
CHATS: dict[str, list[dict[str, Any]]] = {
    "text only": [user(text("a few words please"))],
    "text as a string": [{"role": "user", "content": "a few words please"}],
    "one image": [user(image(0), SEE)],
    "several images": [user(image(0), text("and"), image(1), image(2), SEE)],
    "several turns": [
        user(image(0), SEE),
        answer("the first picture"),
        user(SEE, image(1)),
        answer("the next one ."),
        user(text("and the first ?")),
    ],
    "with a system message": [{"role": "system", "content": "be kind"}, user(image(2), SEE)],
}


def rows(family: str, messages: list[dict[str, Any]]) -> list[int]:
    processor = our_processor(family)
    parts = [p for m in messages if not isinstance(m["content"], str) for p in m["content"]]
    return [processor.plan(Part(p["image"].size)).num_rows for p in parts if p["type"] == "image"]


@pytest.mark.parametrize("name", CHATS)
def test_prompts_have_the_ids_of_transformers(family: str, folders: dict[str, Path], name: str):
    messages = CHATS[name]
    expected = hf_processor(family, folders[family]).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    chat = open_chat(family, folders[family])
    prompt = chat.encode_prompt(messages, rows(family, messages))
    assert prompt.input_ids.tolist() == expected["input_ids"][0]


@pytest.mark.parametrize("name", CHATS)
def test_finished_chats_have_the_ids_of_transformers_and_learn_each_answer_to_its_end_of_turn(
    family: str, folders: dict[str, Path], name: str
):
    messages = [*CHATS[name], answer("both images")]
    expected = hf_processor(family, folders[family]).apply_chat_template(
        messages, tokenize=True, return_dict=True
    )
    chat = open_chat(family, folders[family])
    sample = chat.encode(messages, rows(family, messages), "k")
    assert sample.input_ids.tolist() == expected["input_ids"][0]
    end = "<end_of_turn>" if family == "gemma3" else "<|im_end|>"
    learned = sample.labels[sample.loss_mask == 1]
    told = [m["content"][0]["text"] for m in messages if m["role"] == "assistant"]
    spoken = chat._backend.decode(learned.tolist(), skip_special_tokens=False)
    assert spoken == "".join(words + end for words in told)


def test_images_in_an_answer_are_not_learned_and_the_words_around_them_are(
    family: str, folders: dict[str, Path]
):
    messages = [
        user(image(0), SEE),
        {"role": "assistant", "content": [text("the first"), image(1), text("and"), image(2)]},
        user(SEE),
        {"role": "assistant", "content": [text("the next one ."), image(0)]},
    ]
    chat = open_chat(family, folders[family])
    counts = rows(family, messages)
    assert min(counts) > 1
    sample = chat.encode(messages, counts, "k")
    learned = sample.labels[sample.loss_mask == 1].tolist()
    spoken = chat._backend.decode(learned, skip_special_tokens=False)
    end = "<end_of_turn>" if family == "gemma3" else "<|im_end|>"
    assert spoken == f"the firstand{end}the next one .{end}"


def test_a_users_text_that_looks_like_a_slot_is_text(folders: dict[str, Path]):
    chat = open_chat("gemma3", folders["gemma3"])
    messages = [user(image(0), text("what is {placeholder} or {item} ?")), answer("one")]
    sample = chat.encode(messages, [4], "k")
    assert "{placeholder} or {item}" in chat._backend.decode(sample.input_ids.tolist())


def test_an_answer_may_be_the_models_by_gemmas_own_name(folders: dict[str, Path]):
    chat = open_chat("gemma3", folders["gemma3"])
    ours = [user(SEE), {"role": "model", "content": "one"}]
    sample, same = chat.encode(ours, [], "k"), chat.encode([user(SEE), answer("one")], [], "k")
    np.testing.assert_array_equal(sample.input_ids, same.input_ids)
    np.testing.assert_array_equal(sample.loss_mask, same.loss_mask)
    assert sample.loss_mask.sum() > 1
    with pytest.raises(MessagesError, match="leave the answer out"):
        chat.encode_prompt(ours, [])


@pytest.mark.parametrize(
    "places",
    [
        ["chat_template.jinja"],
        ["chat_template.jinja", "chat_template.json"],
        ["chat_template.jinja", "processor_config.json"],
        ["chat_template.json", "processor_config.json"],
        ["chat_template.jinja", "chat_template.json", "processor_config.json"],
    ],
)
def test_of_several_places_with_a_template_the_one_of_transformers_is_taken(
    tmp_path: Path, places: list[str]
):
    folder = write_folder("qwen2_5_vl", tmp_path)
    (folder / "chat_template.jinja").unlink()
    for place in places:
        text = f"{{{{ 'from {place}' }}}}"
        as_json = place.endswith(".json")
        (folder / place).write_text(json.dumps({"chat_template": text}) if as_json else text)
    theirs, _ = Qwen2_5_VLProcessor.get_processor_dict(folder)
    assert ChatTokenizer(folder).template == theirs["chat_template"]


@pytest.mark.parametrize("form", ["config", "json"])
def test_the_default_of_several_named_templates_is_taken(tmp_path: Path, form: str):
    folder = write_folder("qwen3_vl", tmp_path)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    named: Any = {"tool_use": "{{ 'tools' }}", "default": template}
    place = "chat_template.json" if form == "json" else "tokenizer_config.json"
    document = json.loads((folder / place).read_text()) if (folder / place).is_file() else {}
    (folder / place).write_text(json.dumps(document | {"chat_template": named}))
    assert open_chat("qwen3_vl", folder).template == template


def test_several_templates_without_a_default_are_refused_by_name(tmp_path: Path):
    folder = write_folder("qwen3_vl", tmp_path)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": {"rag": "", "tool_use": ""}}')
    with pytest.raises(ValueError, match=r"are rag, tool_use, and none is named 'default'"):
        open_chat("qwen3_vl", folder)


def test_the_fingerprint_follows_the_text_of_an_item(folders: dict[str, Path]):
    tokens = [
        GEMMA_IMAGE,
        MediaText("<image_soft_token>", "<start_of_image>"),
        MediaText("<image_soft_token>"),
    ]
    chats = [ChatTokenizer(folders["gemma3"], {"image": one}) for one in tokens]
    assert len({chat.fingerprint() for chat in chats}) == 3


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__['os'].system('touch PWNED') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append('x') }}",
        "{% import 'os' as os %}{{ os.system('touch PWNED') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_runs_in_the_sandbox_of_transformers(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = ChatTokenizer(tmp_path)
    question = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "5"}]
    with pytest.raises(MessagesError, match="sample 'k'"):
        chat.encode(question, (), "k")
    assert not (tmp_path / "PWNED").exists()
