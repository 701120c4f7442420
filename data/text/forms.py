"""Convert LLaVA's or ShareGPT's chats and OpenAI's into ours (messages.py); see docs/data.md."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from data.text.messages import short_text

FORMS = """need one of these forms:
  {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]}, \
{"role": "assistant", "content": "..."}], "images": ["a.jpg"]}
  {"conversations": [{"from": "human", "value": "<image> ..."}, {"from": "gpt", "value": "..."}], \
"image": "a.jpg"}
  {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": \
"data:image/png;base64,..."}}, {"type": "text", "text": "..."}]}, ...]}"""

_ALIASES = {  # other names of our roles, whatever the form
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "function"), "tool"),
    "developer": "system",
}
_ROLES = {  # of LLaVA's `from`
    **_ALIASES,
    **dict.fromkeys(("assistant", "model", "function_call"), "assistant"),
    **{role: role for role in ("system", "user", "tool")},
}
_KEYS = {"image": ("image", "images"), "video": ("video", "videos"), "audio": ("audio", "audios")}
_MOST_MESSAGES = 2048
_MOST_FILES = 2**16  # of one chat
_TOKEN = re.compile("<(image|video|audio)>")


@dataclass(frozen=True)
class Embedded:
    """A file inside a document, in Base64."""

    data: str


@dataclass(frozen=True)
class Chat:
    """A document in our form."""

    messages: list[Any]  # the first has the `tools` of the document, if any
    # In order of mention: a path or URL, `Embedded`, the value of a Hugging Face column, or None.
    files: list[Any]
    left: list[str]  # modalities whose files are not all mentioned


def parse_messages(data: bytes) -> list[Any]:
    """Return the messages of a shard's JSON in our form, not checked yet. Raises ValueError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"malformed JSON: {error}") from error
    chat = read_chat(document)
    if any(isinstance(file, Embedded) for file in chat.files):
        raise ValueError("holds a file inside its JSON: `mimo data pack` writes files of their own")
    # Some templates go over all earlier messages for each, so the work grows with their square.
    if len(chat.messages) > _MOST_MESSAGES:
        raise ValueError(f"{len(chat.messages)} messages, at most {_MOST_MESSAGES} are allowed")
    return chat.messages


def read_chat(document: object) -> Chat:
    """Convert a document of any form into ours. Raises ValueError for an unrecognised form."""
    turns: Any = None
    if isinstance(document, Mapping):
        name = "messages" if document.get("messages") is not None else "conversations"
        turns = _parsed(document.get(name), name)
    if not isinstance(document, Mapping) or not _is_list(turns):
        shown = sorted(map(str, document)) if isinstance(document, Mapping) else document
        raise ValueError(f"{short_text(shown)} is no chat; {FORMS}")
    reader = _Reader(document, turns)
    messages = [reader.message(turn) for turn in turns]
    tools = _parsed(document.get("tools"), "tools")
    if tools and messages and isinstance(messages[0], dict):
        messages[0]["tools"] = tools
    return Chat(messages, reader.files, [kind for kind, files in reader.files_of.items() if files])


class _Reader:
    def __init__(self, document: Mapping[str, Any], turns: Sequence[Any]) -> None:
        self.files: list[Any] = []
        self.files_of = {modality: _files(document, modality) for modality in _KEYS}
        self._fps = document.get("fps")
        turns = [turn for turn in turns if isinstance(turn, Mapping)]
        in_parts = any(_is_list(turn.get("content")) for turn in turns)
        is_llava = any("from" in turn for turn in turns)
        # Elsewhere `<image>` is a text like any other.
        self._tokens = is_llava or (any(self.files_of.values()) and not in_parts)
        texts = (turn.get("value" if "from" in turn else "content") for turn in turns)
        tokens = [m for text in texts if isinstance(text, str) for m in _TOKEN.findall(text)]
        self._first: list[str] = []
        for modality, files in self.files_of.items() if self._tokens else ():
            count = tokens.count(modality)
            if files and not count:
                self._first += [modality] * len(files)  # before the first question
            elif files and count != len(files):
                raise ValueError(f"its text has <{modality}> {count} times for {len(files)} files")

    def message(self, turn: Any) -> Any:
        """Convert a message; unrecognised parts stay, and are refused when checked."""
        if not isinstance(turn, Mapping):
            return turn
        turn = _present(turn)
        if "from" in turn:
            turn = _of_llava(turn)
        if isinstance(role := turn.get("role"), str):
            turn["role"] = _ALIASES.get(role, role)
        if "function_call" in turn:
            raise ValueError("function_call is OpenAI's old form; write it as tool_calls")
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [_call(entry) for entry in (calls if _is_list(calls) else [calls])]
            turn.setdefault("content", "")
        content = turn.get("content")
        if isinstance(content, str) and self._tokens:
            turn["content"] = self._split(content, turn.get("role") == "user")
        elif _is_list(content):
            turn["content"] = [self._part(part) for part in content]
        return turn

    def _split(self, text: str, asks: bool) -> Any:
        parts: list[Any] = []
        if asks:
            parts, self._first = [self._item(modality) for modality in self._first], []
        for number, piece in enumerate(_TOKEN.split(text)):
            if number % 2:
                parts.append(self._item(piece))
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts if any(part["type"] != "text" for part in parts) else text

    def _item(self, modality: str, part: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return our part for the next file of a modality, or for the file that ``part`` names."""
        part = part or {}
        value = next((part[n] for n in (modality, "bytes", "path", "url") if n in part), None)
        if value is None:
            value = self.files_of[modality].pop(0) if self.files_of.get(modality) else None
        keys = {name: part[name] for name in ("frames", "fps") if name in part}
        if value is not None and _is_list(value) != (modality == "video"):
            raise ValueError(
                f"{modality} {short_text(value)}: need one file for each image or clip, and for a "
                'video the list of its frames, ["0.jpg", "1.jpg", ...]; videos are not decoded'
            )
        if _is_list(value):
            keys["frames"] = len(value)
            if self._fps is not None:
                keys.setdefault("fps", self._fps)
        frames = keys.get("frames", 1)  # anything, until it is checked
        count = frames if type(frames) is int and value is None else 1
        if len(self.files) + count > _MOST_FILES:
            raise ValueError(f"it mentions more than {_MOST_FILES} files")
        files = value if _is_list(value) else [value] * count
        self.files += [_embedded(file) for file in files]
        return {"type": modality, **keys}

    def _part(self, part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        part = _present(part)
        match part:
            case {"type": "image_url"}:
                url = part.get("image_url")
                url = url.get("url") if isinstance(url, Mapping) else url
                return self._item("image", {"url": url})
            case {"type": "input_audio"}:
                sound = part.get("input_audio")
                data = sound.get("data") if isinstance(sound, Mapping) else None
                return self._item("audio", {"audio": Embedded(str(data))})
            case {"type": str(kind)} if kind != "text":
                return self._item(kind, part)
        return part


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls, with which Parquet fills rows."""
    return {name: value for name, value in row.items() if value is not None}


def _of_llava(turn: dict[str, Any]) -> dict[str, Any]:
    sender, value = turn.pop("from"), turn.pop("value", None)
    if not isinstance(sender, str) or sender not in _ROLES:
        raise ValueError(f'a message is "from" {short_text(sender)}; need one of {sorted(_ROLES)}')
    if sender == "function_call":
        return {**turn, "role": "assistant", "tool_calls": _parsed(value, "a function_call")}
    return {**turn, "role": _ROLES[sender], "content": value}


def _files(document: Mapping[str, Any], modality: str) -> list[Any]:
    """Return the files that a document names beside its messages; a video is a list of frames."""
    for key in _KEYS[modality]:
        value = document.get(key)
        if isinstance(value, str | bytes | Mapping):
            return [value]
        if _is_list(value) and value:
            frames = key == "video" and not any(_is_list(entry) for entry in value)
            return [value] if frames else list(value)
    return []


def _embedded(value: Any) -> Any:
    """Convert a data URL into a file; others stay. Raises ValueError unless it is Base64."""
    if not isinstance(value, str) or not value.startswith("data:"):
        return value
    kind, comma, data = value.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise ValueError(f"the URL {short_text(value)}: need data:<type>;base64,<data>")
    return Embedded(data)


def _call(call: Any) -> dict[str, Any]:
    """Convert a tool call; its arguments become an object, which templates write as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        arguments = _parsed(function.get("arguments") or {}, "the arguments of a call")
        if isinstance(arguments, Mapping):
            call_id = {"id": call["id"]} if call.get("id") is not None else {}
            named = {"name": function["name"], "arguments": arguments}
            return {**call_id, "type": "function", "function": named}
    raise ValueError(
        f"the call {short_text(call)}: need "
        '{"type": "function", "function": {"name": "...", "arguments": {...}}}'
    )


def _parsed(value: Any, what: str) -> Any:
    """Parse JSON inside a string, as data sets often have it; other values stay."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is a text that is not JSON: {short_text(value)}") from error


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)
