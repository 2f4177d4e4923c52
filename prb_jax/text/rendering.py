"""Render chat templates, which are untrusted programs, with a budget for each rendering.

The environment matches transformers: Jinja's sandbox, trimmed blocks, ``break`` and ``continue``, ``tojson``,
``raise_exception`` and the tag ``generation``. In addition, every iteration, call, filter and operation costs steps in
proportion to its data, and a value that would be too large raises an error before it is built. Costs are counts, not
times, so a template that renders here renders on every machine.
"""

from __future__ import annotations

import functools
import json
import re
import string
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_MOST_STEPS = 1_000_000  # for one conversation; a usual template takes about ten per message
_LARGEST = 1 << 25  # characters and elements of one value
_LONGEST_TEMPLATE = 1 << 18
_LONGEST_NUMBER = 4096  # bits
_STEP_CHARACTERS = 256
# Filters and methods with results larger than their inputs, at most the product of their sizes.
_GROWING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "join", "tojson", "round"})
_NOT_OFFERED = (
    "batch",
    "filesizeformat",
    "pprint",
    "random",
    "slice",
    "sum",
    "urlize",
    "wordwrap",
    "xmlattr",
)
_WIDE = re.compile(r"[0-9]{4}|[*{]")
_SPEC = re.compile(r"%[^%a-zA-Z]*")


@functools.lru_cache(maxsize=8)
def compile_template(text: str) -> Callable[..., str]:
    """Return a function that renders a template with the given variables.

    Raises:
      jinja2.TemplateError: The text is not a valid template, or is too long. The function raises it, or any other
        exception, for errors of the template.
    """
    if len(text) > _LONGEST_TEMPLATE:
        raise jinja2.TemplateError(f"expected at most {_LONGEST_TEMPLATE:,} characters, found {len(text):,}")
    environment = _Environment()
    template = environment.from_string(text)

    def render(**variables: Any) -> str:
        with environment.lock:
            environment.left = _MOST_STEPS
            return template.render(**variables)

    return render


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        self.lock, self.left = threading.Lock(), _MOST_STEPS
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.globals |= {"namespace": _PlainNamespace, "raise_exception": _raise_exception}
        del self.globals["lipsum"]
        filters = {name: made for name, made in self.filters.items() if name not in _NOT_OFFERED}
        filters["tojson"] = _to_json
        self.filters = {name: self._charged(name, made) for name, made in filters.items()}
        self.tests = {name: self._charged(name, made) for name, made in self.tests.items()}

        @pass_context  # keeps Jinja from evaluating constants while compiling
        def finalize(context: Any, value: Any) -> Any:
            return self.spend(value)

        self.finalize = finalize

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Metering().visit(super()._parse(source, name, filename))

    def step(self, cost: int = 1) -> None:
        self.left -= cost
        if self.left < 0:
            raise jinja2.TemplateError(f"the template takes more than {_MOST_STEPS:,} steps")

    def spend(self, value: Any) -> Any:
        """Pay for the size of a value and return the value."""
        self.size(value)
        return value

    def joined(self, *values: Any) -> str:
        self.size(values)
        return "".join(map(str, values))

    def size(self, value: Any) -> int:
        """Pay for and return the characters and elements of a value; shared parts count each time they occur."""
        if value is None or isinstance(value, bool):
            self.step()
            return 1
        if isinstance(value, str) and len(value) < _STEP_CHARACTERS:
            self.step()
            return len(value)
        total, waiting = 0, [value]
        while waiting:
            item, elements = waiting.pop(), ()
            total += 1
            if isinstance(item, Namespace):
                item = object.__getattribute__(item, "_Namespace__attrs")
            if isinstance(item, str | bytes | range):
                total += len(item)
                self.step(1 + len(item) // (1 if isinstance(item, range) else _STEP_CHARACTERS))
            elif isinstance(item, Mapping):
                elements = [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                elements = item
            elif isinstance(item, int):
                total += item.bit_length() // 8
            self.step(1 + len(elements))
            if total + len(elements) > _LARGEST:
                raise jinja2.TemplateError(f"the template makes a value of more than {_LARGEST:,} characters")
            waiting.extend(elements)
        return total

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        subject = getattr(__obj, "__self__", None)
        if subject is __self:
            return __obj(*args)
        name = getattr(__obj, "__name__", "")
        if name in ("format", "format_map"):
            subject = getattr(getattr(__obj, "__wrapped__", None), "__self__", "")
        if not isinstance(subject, str | bytes | Sequence | Mapping):
            subject = ""
        __self._check(name, subject, args, kwargs)
        return __self.spend(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = self.size(left) + self.size(right)
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and one.bit_length() > _LONGEST_NUMBER:
                raise jinja2.TemplateError(
                    f"the template computes with numbers of more than {_LONGEST_NUMBER} bits"
                )
            if operator == "*" and isinstance(one, int) and isinstance(other, str | list | tuple):
                self._refuse(self.size(other) * max(one, 1))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._refuse(left.bit_length() * abs(right), most=_LONGEST_NUMBER)
        if operator == "%" and isinstance(left, str):
            self._check_format(left, _SPEC.findall(left), sizes)
        return self.spend(super().call_binop(context, operator, left, right))

    def _charged(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(made, "jinja_pass_arg") else 0

        @functools.wraps(made)
        def charged(*args: Any, **kwargs: Any) -> Any:
            if name in ("length", "count") and isinstance(args[first], list | str):
                self.step()  # constant cost, because templates call it for all messages at each message
                return made(*args, **kwargs)
            self._check(name, args[first], args[first + 1 :], kwargs)
            return self.spend(made(*args, **kwargs))

        return charged

    def _check(self, name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Pay for the arguments of an operation; raise an error if its result could be too large."""
        given = [*args, *kwargs.values()]
        length, others = self.size(subject), sum(map(self.size, given))
        if name in _GROWING:
            numbers = sum(abs(value) for value in given if isinstance(value, int))
            if name == "round" and numbers > 100:
                raise jinja2.TemplateError("the template rounds to more than 100 digits")
            self._refuse(length * (1 + numbers + others))
        elif name == "replace" and isinstance(subject, str) and given and isinstance(given[0], str):
            self._refuse(length + subject.count(given[0]) * others)
        elif name == "translate":
            raise jinja2.TemplateError("the template calls 'translate', which is not offered")
        elif name in ("format", "format_map") and isinstance(subject, str):
            fields = [
                field or "" for _, place, field, _ in string.Formatter().parse(subject) if place is not None
            ]
            specs = _SPEC.findall(subject) if name == "format" else []
            self._check_format(subject, [*fields, *specs], length + others)

    def _check_format(self, text: str, specs: Sequence[str], size: int) -> None:
        if any(_WIDE.search(spec) for spec in specs):
            raise jinja2.TemplateError("the template formats a value with a width of more than 999")
        self._refuse(len(text) + len(specs) * (1000 + size))

    def _refuse(self, size: int, *, most: int = _LARGEST) -> None:
        if size > most:
            raise jinja2.TemplateError(f"the template makes a value of more than {most:,} characters or bits")


class _Metering(NodeTransformer):
    """Add a step to every body that can repeat, and payment to expressions that no sandbox hook sees."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        node.iter = _own("spend", node.iter)
        return self._stepping(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._stepping(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._stepping(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        node = self.generic_visit(node)  # pyright: ignore[reportAssignmentType]
        for part in (node, *node.ops):
            if not isinstance(part.expr, nodes.Const):
                part.expr = _own("spend", part.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node = self.generic_visit(node)  # pyright: ignore[reportAssignmentType]
        if isinstance(node.arg, nodes.Slice):
            node.node = _own("spend", node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _own("spend", _own("joined", *node.nodes))

    def _stepping(self, node: Any) -> Any:
        constant = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        step = _own("step", nodes.Const(1 + constant // _STEP_CHARACTERS))
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node


def _own(name: str, *args: nodes.Node) -> nodes.Call:
    return nodes.Call(
        nodes.EnvironmentAttribute(name), list(args), [], None, None, lineno=args[0].lineno or 1
    )


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text; it does not change the rendered text."""

    tags = {"generation"}  # noqa: RUF012 - as in Jinja

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(Namespace):
    """A Jinja namespace without names that start with an underscore, which belong to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        Namespace.__init__(args[0], {})
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot contain the name {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
