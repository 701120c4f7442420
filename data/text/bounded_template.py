"""Chat templates run out of time and room: they are programs of whoever made the checkpoint.

The sandbox of jinja2, as transformers sets it up, keeps a template from Python's internals, but
lets it loop and grow without end. Here every round of a loop, every call and every text that it
makes costs something of a budget, and what could make a lot at once is refused beforehand.
Limits are far above what any conversation needs, and reaching one is an error of the template.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast, override

from jinja2 import TemplateError, nodes
from jinja2.environment import Template
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_SECONDS = 10.0
_CHARACTERS = 1 << 26
"""That a template may build on its way to a text, rounds and calls included."""
_ITEMS = 1 << 20
"""In a list or mapping, those inside it included."""
_SOURCE_CHARACTERS = 1 << 20
_NUMBER = 10**6
"""That a function is given, so that it is no width or count of billions."""
# Not in any chat template that we know; some of them take for ever on the wrong text.
_NOT_FILTERS = ("center", "filesizeformat", "format", "pprint", "striptags", "sum", "urlize")
_NOT_FILTERS += ("wordwrap", "xmlattr")
_NOT_METHODS = {"encode", "to_bytes", "expandtabs", "translate", "maketrans"}
_WIDE = re.compile(r"\d{4}|\*|\{[^{}]*\{")
"""In a format: a width of thousands, or one that is an argument."""


class TemplateLimitError(TemplateError):
    """A template that takes too long or makes too much."""


class _Budget(threading.local):
    left: float = _CHARACTERS
    deadline: float = float("inf")


_budget = _Budget()


def _spend(cost: float) -> None:
    _budget.left -= cost
    if _budget.left < 0:
        raise TemplateLimitError(f"the chat template makes more than {_CHARACTERS:,} characters")
    if time.monotonic() > _budget.deadline:
        raise TemplateLimitError(f"the chat template takes more than {_SECONDS:g} s")


def _made(value: Any) -> Any:
    """A value that a template made, after it was paid for."""
    kind = type(value)
    if kind is str:
        _spend(1 + len(value))
    elif kind in (list, tuple, dict, set):
        _spend(_weight(value))
    else:
        _spend(1)
    return value


def _weight(value: Any) -> int:
    """Characters and items in nested containers, each as often as it is reached."""
    found, items, waiting = 0, 0, [value]
    while waiting:
        one = waiting.pop()
        items += 1
        if items > _ITEMS:
            raise TemplateLimitError(f"the chat template makes a list of more than {_ITEMS:,}")
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, (list, tuple, set)):
            waiting += one
    return found + items


def _size(value: Any) -> int:
    """What a function of it may have to write: its characters, or as many as the number says."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, int):
        return abs(value) + 1
    if isinstance(value, (list, tuple)):
        return sum(len(one) + 1 if isinstance(one, str) else 1 for one in value) + 1
    return 1


def _deep_size(value: Any) -> int:
    return _weight(value) if isinstance(value, (list, tuple, dict)) else _size(value)


def _listed(values: Iterable[Any]) -> tuple[Any, ...]:
    """The same, where what comes one by one is a list, so that its size is known."""
    return tuple(list(one) if isinstance(one, Iterator) else one for one in values)


def _foresee(of: Any, given: Iterable[Any], size: Callable[[Any], int] = _size) -> None:
    """Refuse what could make more than is left: most that anything makes is the product.

    of: a number is only a number here, but among those ``given`` a width or a count.
    """
    product = 1 if isinstance(of, (int, float)) else size(of)
    for value in given:
        if isinstance(value, (int, float)) and abs(value) > _NUMBER:
            raise TemplateLimitError(f"the chat template asks for {value:.3g} of something")
        product *= size(value)
    if product > _budget.left:
        raise TemplateLimitError("the chat template makes too large a text at once")


def _are_large(left: Any, right: Any) -> bool:
    """Whether their product has hundreds of digits."""
    both = isinstance(left, int) and isinstance(right, int)
    return both and left.bit_length() + right.bit_length() > 1000


def _foresee_format(text: str, values: Iterable[Any]) -> None:
    if _WIDE.search(text):
        raise TemplateLimitError("the chat template formats with a width of thousands")
    if len(text) * max(map(_weight, values), default=1) > _budget.left:
        raise TemplateLimitError("the chat template makes too large a text at once")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is paid for; it keeps the marks by which jinja2 hands over its context."""
    size = _deep_size if function.__name__ == "tojson" else _size
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = _listed(args)
        _foresee(args[first], (*args[first + 1 :], *kwargs.values()), size)
        return _made(function(*args, **kwargs))

    return call


def _rounds(items: Any, cost: int) -> Any:
    """What a loop goes through, each round of which has so many characters of its own."""
    if isinstance(items, Sized):
        _spend(len(items) * (1 + cost))
        return items
    return _paid(items, 1 + cost)


def _paid(items: Iterable[Any], cost: int) -> Iterator[Any]:
    for item in items:
        _spend(cost)
        yield item


class _Payments(NodeTransformer):
    """Puts into a template what it has to pay where it loops, joins texts and makes lists."""

    @override
    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            cost = nodes.Const(_characters(node))
            node.iter = _filtered(cast("nodes.Expr", node.iter), "_rounds", cost)
        makes = isinstance(node, (nodes.Concat, nodes.List, nodes.Dict))
        if makes or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _filtered(cast("nodes.Expr", node), "_made")
        return node


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [*args], [], None, None, lineno=node.lineno)


def _characters(node: nodes.Node) -> int:
    """Of the texts that stand in a part of a template."""
    return sum(len(text.data) for text in node.find_all(nodes.TemplateData))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """As the environment of transformers that is given, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, theirs: ImmutableSandboxedEnvironment) -> None:
        super().__init__(
            trim_blocks=theirs.trim_blocks,
            lstrip_blocks=theirs.lstrip_blocks,
            extensions=[type(one) for one in theirs.extensions.values()],
            finalize=_made,
        )
        self.filters = {
            name: _bounded(one) for name, one in theirs.filters.items() if name not in _NOT_FILTERS
        }
        self.filters |= {"_rounds": _rounds, "_made": _made}
        self.globals = {name: one for name, one in theirs.globals.items() if name != "lipsum"}
        self.macro_cost = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > _SOURCE_CHARACTERS:
            raise TemplateLimitError(
                f"the chat template has more than {_SOURCE_CHARACTERS:,} characters"
            )
        tree = super()._parse(source, name, filename)
        self.macro_cost = _characters(tree)
        return _Payments().visit(tree)

    @override
    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _foresee_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "**" or (operator == "*" and _are_large(left, right)):
            raise TemplateLimitError(f"the chat template computes a number by {operator}")
        elif operator == "*" and not isinstance(left, (int, float)):
            _foresee(left, [right])
        elif operator == "*" and not isinstance(right, (int, float)):
            _foresee(right, [left])
        return _made(super().call_binop(context, operator, left, right))

    @override
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, LoopContext):  # of a loop that calls itself
            args = (_rounds(args[0], __self.macro_cost), *args[1:])
        elif isinstance(__obj, (Macro, BlockReference)):
            _spend(__self.macro_cost)
        elif isinstance(owner, (str, int)):
            name = __obj.__name__
            if name in _NOT_METHODS:
                raise TemplateLimitError(f"the chat template calls {name}, which is refused")
            args = _listed(args)
            if name in ("format", "format_map"):
                _foresee_format(str(owner), (*args, *kwargs.values()))
            else:
                _foresee(owner, (*args, *kwargs.values()))
        return _made(super().call(__context, __obj, *args, **kwargs))


class _BoundedTemplate(Template):
    """A template whose every rendering has a budget of its own."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        _budget.left, _budget.deadline = _CHARACTERS, time.monotonic() + _SECONDS
        try:
            return super().render(*args, **kwargs)
        finally:
            _budget.left, _budget.deadline = _CHARACTERS, float("inf")


BoundedEnvironment.template_class = _BoundedTemplate


@functools.cache
def bound_templates() -> None:
    """Give all chat templates that transformers renders in this process their limits."""
    from transformers.utils import chat_template_utils

    theirs = cast("Any", chat_template_utils)
    compile_theirs = theirs._compile_jinja_template

    @functools.lru_cache
    def compile_bounded(text: str) -> Template:
        environment = compile_theirs("").environment
        return BoundedEnvironment(environment).from_string(text)

    theirs._compile_jinja_template = compile_bounded
