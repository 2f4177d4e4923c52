"""Templates render as transformers renders them, and those that run forever or make huge texts are refused."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from prb_jax.text.rendering import compile_template
from tests import tiny_tokenizer as tiny

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Tea? " * 40},
    {"role": "assistant", "content": "Yes: <b>green</b>, é\n"},
]
BIG = "{% set a = 'a' * 1000000 %}"
GROWING = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}"

USUAL = {
    "turns": tiny.CHAT,
    "bos": tiny.CHAT_WITH_BOS,
    "thinking": tiny.THINKING,
    "blocks": "  {% if true %}\n x\n  {%- endif %}\n{#- note #}\n{{ messages | length }}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}"
    "{% set ns.last = ns.last ~ '[' ~ m['role'] ~ loop.index0 ~ ']' %}{% endfor %}{{ ns.n }}{{ ns.last }}",
    "macro": "{% macro turn(m, end='!') %}{{ m.role }}: {{ m.content|trim }}{{ end }}"
    "{{ caller() if caller }}{% endmacro %}"
    "{% for m in messages[::-1] %}{{ turn(m) }}{% endfor %}{% call turn(messages[0], end='?') %}called{% endcall %}",
    "control": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content[:9] }}"
    "{% break %}{% endfor %}",
    "filters": "{{ messages | tojson(indent=2) }}{{ messages | map(attribute='role') | join(', ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | count }}{{ ('a,b'.split(',') | reverse | list)[0] }}"
    "{{ messages[1].content.strip() | replace('Tea', 'Coffee') | upper | indent(4) }}{{ 3.14159 | round(2) }}"
    "{{ '%s and %05.1f' % ('a', 2.5) }}{{ '{:>6}|{}'.format('x', 1) }}{{ '%s' | format(7) }}"
    "{{ {'a': 1} | items | list }}",
    "tests": "{% if tools is none and nothing is not defined and 'user' in messages|map(attribute='role')|list %}"
    "{{ 2 ** 3 }}{% endif %}{% for m in messages if m.role != 'system' %}"
    "{{ m.content is string }}{{ loop.last }}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "set block": "{% set text %}{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}"
    "{% endset %}{{ text | trim }}",
}  # fmt: skip

HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop that is filtered": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "map": "{% for i in range(99999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
    "search": "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{{ 'b' in a }}{{ a[1:] == a }}{% endfor %}",
    "count": "{% set a = 'a' * 9999999 %}{% for i in range(99999) %}{{ a.count('b') }}{% endfor %}",
    "constant text": "{% for i in range(99999) %}{% for j in range(99) %}" + "x" * 9999 + "{% endfor %}{% endfor %}",
    "product": "{{ 'a' * 10**10 }}",
    "product of a list": "{% set x = 10**10 * [1] %}",
    "doubling": GROWING + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling by plus": GROWING + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling by blocks": GROWING + "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}{% endfor %}",
    "doubling by lists": GROWING + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "circle": "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns }}",
    "centre": "{{ 'a' | center(10**9) }}",
    "padding": "{{ 'a'.ljust(10**9) }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width by a filter": "{{ '%1000000000d' | format(1) }}",
    "width by an argument": "{{ '%*d' % (10**9, 1) }}",
    "width by format": "{{ '{:>1000000000}'.format(1) }}",
    "width within a width": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "replace": BIG + "{{ a.replace('a', a) }}",
    "replace by a filter": BIG + "{{ a | replace('a', a) }}",
    "join": BIG + "{{ (range(99999) | list) | join(a) }}",
    "join of a text": BIG + "{{ a.join(a) }}",
    "indent": "{{ ('\n' * 99999) | indent(99999) }}",
    "translate": BIG + "{{ a.translate({97: a}) }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": GROWING + "{% set ns.s = (ns.s if ns.s is number else 3) ** 2 %}{% endfor %}",
    "division": "{% set a = ('f' * 9999999) | int(base=16) %}{{ a // (a - 1) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "length of the template": "x" * 300_000,
}  # fmt: skip
REFUSED_OTHERWISE = {
    "endless recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{{ loop([[1]]) }}{% endfor %}",
    "nested": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "texts at random": "{{ lipsum(n=1000000) }}",
    "names of Python": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
}


@pytest.mark.parametrize("name", USUAL)
def test_as_transformers_renders(name: str) -> None:
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=USUAL[name], bos_token="<s>")
    given = {"tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "<s>"}
    render = compile_template(USUAL[name])
    assert render(messages=MESSAGES, **given) == expected
    assert render(messages=MESSAGES, **given) == expected  # nothing of the first is left


@pytest.mark.parametrize("name", HOSTILE)
def test_budget(name: str) -> None:
    with pytest.raises(
        Exception, match=r"template (takes|makes|formats|computes|rounds|calls)|expected at most"
    ):
        compile_template(HOSTILE[name])(messages=MESSAGES)


@pytest.mark.parametrize("name", REFUSED_OTHERWISE)
def test_refused_otherwise(name: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - of the sandbox, or of Python's own limits
        compile_template(REFUSED_OTHERWISE[name])(messages=MESSAGES)


def test_long_conversations_are_within_the_budget() -> None:
    template = USUAL["filters"] + USUAL["namespace"] + tiny.CHAT_WITH_BOS
    turns = [
        {"role": "user", "content": "word " * 2_000},
        {"role": "assistant", "content": "w" * 10_000},
    ] * 100
    text = compile_template(template)(messages=turns, bos_token="<s>")
    assert len(text) > 2_000_000
