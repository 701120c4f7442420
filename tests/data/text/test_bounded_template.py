"""Templates that attack: they end soon, with an error, and reach nothing of Python."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from data.text import bounded_template
from data.text.chat import ChatTokenizer
from data.text.digits import write_tokenizer
from data.text.messages import MessagesError
from tests.cases import quick_values

QUESTION = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "5"}]
DOUBLE = "{% set ns = namespace(x='y' * 1000) %}{% for i in range(90) %}"
LISTS = "{% set ns = namespace(x=['y']) %}{% for i in range(90) %}"
RANGES = "{% for i in range(99999) %}"
ATTACKS = {
    "reaches classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reaches classes by a filter": "{{ (''|attr('__class__')).__mro__ }}",
    "reaches globals": "{{ raise_exception.__globals__['os'].system('touch PWNED') }}",
    "reaches modules": "{{ namespace.__init__.__globals__ }}",
    "formats its way": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "changes the messages": "{{ messages.append('x') }}",
    "imports": "{% import 'os' as os %}{{ os.system('touch PWNED') }}",
    "includes a file": "{% include '/etc/passwd' %}",
    "loops": RANGES * 4 + "{% endfor %}" * 4,
    "loops and writes": RANGES * 2 + "text" * 1000 + "{% endfor %}" * 2,
    "loops over what is made on the way": RANGES
    + "{% for j in range(99999)|map('string') %}{% endfor %}{% endfor %}",
    "macros call themselves": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "a loop calls itself": "{% for i in range(90) recursive %}{{ loop(range(90)) }}{% endfor %}",
    "doubles a text by ~": DOUBLE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubles a text by +": DOUBLE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubles a text by format": DOUBLE + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "doubles a text in a block": DOUBLE + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "doubles by replace": DOUBLE + "{% set ns.x = ns.x.replace('y', 'yy') %}{% endfor %}",
    "doubles lists": LISTS + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubles mappings": LISTS
    + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson }}",
    "doubles numbers": "{% set ns = namespace(x=9) %}{% for i in range(90) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "multiplies a text": "{{ 'a' * 10**11 }}",
    "multiplies a text by a number it has": "{{ 'a' * 99999999999 }}",
    "multiplies a list": "{{ [0] * 99999999999 }}",
    "takes a power": "{{ 10 ** 10 ** 10 }}",
    "adjusts": "{{ 'a'.ljust(99999999999) }}",
    "centers": "{{ 'a'|center(99999999999) }}",
    "formats wide": "{{ '%99999999999d' % 1 }}",
    "formats as wide as told": "{{ '%*d' % (99999999999, 1) }}",
    "formats wide by a method": "{{ '{:99999999999}'.format(1) }}",
    "formats as told by a method": "{{ '{:{}}'.format(1, 99999999999) }}",
    "formats by a filter": "{{ '%99999999999d'|format(1) }}",
    "writes bytes": "{{ (1).to_bytes(99999999999) }}",
    "indents": "{{ (messages|tojson(indent=99999999999)) }}",
    "fills batches": "{{ [1]|batch(99999999999, 0)|list }}",
    "replaces much by much": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "joins with much": "{{ ('a' * 100000)|join('b' * 100000) }}",
    "joins the same again": "{{ range(99999)|map(attribute='x', default='b' * 100000)|join }}",
    "joins the same by a method": "{{ ''.join(range(9999)|map(attribute='x', default='b' * 99999)) "
    "}}",
    "writes nonsense": "{{ lipsum(n=99999999) }}",
    "is deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "is long": "x" * (1 << 21),
}


@pytest.mark.parametrize(
    "template",
    quick_values(ATTACKS, "reaches globals", "loops", "doubles a text by ~", "multiplies a text"),
)
def test_a_template_that_attacks_ends_soon_with_an_error(
    tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_template, "_SECONDS", 0.2)
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    peak, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    chat = ChatTokenizer(tmp_path)
    with pytest.raises(MessagesError, match="sample 'k'"):
        chat.encode(QUESTION, (), "k")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**20, "1 GiB"
    assert time.process_time() - begin < 30
    assert not (tmp_path / "PWNED").exists()


def test_numbers_of_any_size_and_usual_filters_are_as_ever(tmp_path: Path) -> None:
    template = (
        "{{ 1234567890|tojson }} {{ 1700000000|string }} {{ 1700000000 * 1000 }} {{ '%05d' % 42 }} "
        "{{ 'ab' * 3 }} {{ [1, 'b']|join(', ') }} {{ {'n': 12345678}|tojson }} {{ 2.5|round(1) }} "
        "{% for a in [1, 2, 3] if a > 1 %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} "
        "{% endfor %}{{ messages|map(attribute='role')|list }} {{ ' x '.strip()|upper ~ 'y' }}"
    )
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    assert ChatTokenizer(tmp_path)._template.render(QUESTION) == (
        "1234567890 1700000000 1700000000000 00042 ababab 1, b "
        "{\"n\": 12345678} 2.5 1/2False 2/2True ['user', 'assistant'] Xy"
    )


def test_a_template_that_does_nothing_unusual_has_room_for_a_very_long_conversation(
    tmp_path: Path,
) -> None:
    write_tokenizer(tmp_path)
    chat = ChatTokenizer(tmp_path)
    messages = [
        {"role": role, "content": "what is this ? " * 100}
        for _ in range(200)
        for role in ("user", "assistant")
    ]
    assert len(chat.encode(messages, (), "k").input_ids) > 10**5
