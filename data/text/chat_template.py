"""Finds the chat template in a folder in Hugging Face format, wherever its version keeps it.

Checkpoints of vision-language models keep it with the processor: in `chat_template.jinja`, or in
`processor_config.json` or `chat_template.json` before that existed. As in transformers 5, an older
place takes precedence if a folder has several. A template in `tokenizer_config.json` beside them is
often one for text alone. Several named templates may be given; `default` is the one for chatting.
Source: transformers `ProcessorMixin.get_processor_dict` and `_resolve_chat_template`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DEFAULT = "default"


def find_chat_template(directory: Path, of_tokenizer: object) -> str:
    """The text of the template of a folder.

    of_tokenizer: the template that transformers loads with the tokenizer: chat_template.jinja if
    there is one, else that of tokenizer_config.json; one, several by name, or None.

    Raises ValueError when there is none, several without a default, or a damaged file.
    """
    files = (directory / name for name in ("processor_config.json", "chat_template.json"))
    of_processor = (_read_json(file).get("chat_template") for file in files)
    found = next((one for one in of_processor if one is not None), of_tokenizer)
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}
    if isinstance(found, dict):
        if not isinstance(found.get(_DEFAULT), str):
            names = ", ".join(map(str, found)) or "none"
            raise ValueError(
                f"the chat templates in {directory} are {names}, and none is named {_DEFAULT!r}: "
                "put the one to use into chat_template.jinja and leave it out of the other files"
            )
        found = found[_DEFAULT]
    if not isinstance(found, str) or not found:
        raise ValueError(
            f"the tokenizer in {directory} has no chat template: add chat_template.jinja"
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return document if isinstance(document, dict) else {}


def generation_ends(directory: Path) -> list[int]:
    """Tokens at which a model stops answering, as its ``generation_config.json`` says, if any."""
    given = _read_json(directory / "generation_config.json").get("eos_token_id")
    return [given] if isinstance(given, int) else list(given or [])
