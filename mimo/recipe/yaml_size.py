"""How large YAML text becomes once its aliases are followed, found before any of it is built.

Nine levels of nine aliases are a few hundred bytes of text but 387 million values. The parser's
events come one by one, without recursion, so the cost of counting depends on the text alone.
"""

import re

from ruamel.yaml import YAML
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    NodeEvent,
    ScalarEvent,
)

MAX_VALUES = 20_000
MAX_DEPTH = 50
_MAX_DIGITS = 100
_NUMBER = re.compile(r"[-+]?[0-9][0-9a-fA-FoxX_.+-]*")


class YamlTooLarge(ValueError):
    """YAML text larger than any real recipe. line: counts from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def check_size(text: str) -> None:
    """Raise YamlTooLarge for too many values, too deep nesting, or too long a number.

    Raises ruamel's errors for text that is not YAML.
    """
    expanded: dict[str, int] = {}  # values of each anchored node, aliases followed
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and the count where the node began
    count = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            if any(anchor == event.anchor for anchor, _ in open_nodes):
                raise YamlTooLarge("an alias contains itself", line)
            count += expanded.get(event.anchor, 1)
        elif isinstance(event, NodeEvent):
            count += 1
        if count > MAX_VALUES:
            raise YamlTooLarge(f"holds more than {MAX_VALUES} values, aliases followed", line)
        if isinstance(event, ScalarEvent):
            is_long = len(event.value) > _MAX_DIGITS and event.implicit[0]
            if is_long and _NUMBER.fullmatch(event.value):
                raise YamlTooLarge(f"holds a number of {len(event.value)} characters", line)
            if event.anchor is not None:
                expanded[event.anchor] = 1
        elif isinstance(event, CollectionStartEvent):
            open_nodes.append((event.anchor, count - 1))
            if len(open_nodes) > MAX_DEPTH:
                raise YamlTooLarge(
                    f"lists and mappings are nested more than {MAX_DEPTH} deep", line
                )
        elif isinstance(event, CollectionEndEvent):
            anchor, start = open_nodes.pop()
            if anchor is not None:
                expanded[anchor] = count - start
