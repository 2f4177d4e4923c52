"""Parser of all verbs, arguments that several verbs share, and function calls with parsed arguments."""

from __future__ import annotations

import argparse
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args, get_origin

from prb_jax.commands.help_pages import ENDPOINT, JUDGES, Formatter, HelpAll, help_page
from prb_jax.commands.values import Listed, not_negative, number_type, positive, separated
from prb_jax.errors import printable
from prb_jax.models.readouts.load_options import IMPLICIT
from prb_jax.records.options import from_flat, options_of
from prb_jax.scoring import HISTORY

if TYPE_CHECKING:
    from prb_jax.behaviour.judges.options import JudgeOptions

Options = TypeVar("Options")
Result = TypeVar("Result")

REWARD_MODEL = "revision base tokenizer chat_template readout"
"""Fields of `LoadOptions` about reading a reward model; other models have no read-out."""

OF_REWARDS = " ".join(("readout", *IMPLICIT))
"""Fields of `LoadOptions` about rewards, which language models that write or judge do not use."""

_FEW_VERBS = 12  # most choices that an error about an unknown verb lists


class Parser(argparse.ArgumentParser):
    """Parser with short usage, one-line errors, and no abbreviated flags: a new flag must not change an old command.

    Attributes:
      needed: Names of required options that a config file may contain instead.
      made: Functions by parameter name; each makes the parameter's value from a command line's options, see `fields`.
      titles: Groups of the help page by destination, where they differ from `help_pages.GROUPS`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": Formatter, **options})
        if " " in self.prog:
            about = "Explain every option"
            self.add_argument(
                "--help-all", action=HelpAll, nargs=0, dest="help", default=argparse.SUPPRESS, help=about
            )
        self.titles: dict[str, str] = {}
        self.needed: tuple[str, ...] = ()
        self.made: dict[str, Callable[[argparse.Namespace], Any]] = {}
        self._intermixed = False

    def option(
        self,
        spec: str,
        about: str,
        kind: Callable[[str], Any] | None = None,
        *,
        default: Any = None,
        extend: bool = True,
        commas: bool = False,
        **more: Any,
    ) -> None:
        """Add an argument.

        Args:
          spec: Usage text: "--flag" for no value, "--flag VALUE", "--flag LOW HIGH" for two values, "--flag VALUE ..."
            for several, "--flag A,B" for several with commas or blanks between them, "NAME", "[NAME]" and "NAME ..."
            for words without a flag.
          about: Help text; the default is appended.
          kind: Function that converts a text to the value.
          default: Value if the argument is missing.
          extend: If True, a flag of several values without a default may be repeated, and the values add up.
          commas: If True, commas may separate the values of "--flag VALUE ..." too.
          more: Other arguments of argparse.
        """
        several = spec.rstrip("]").endswith(" ...")
        name, _, metavar = spec.strip("[]").removesuffix(" ...").partition(" ")
        about = about[:1].upper() + about[1:]
        if not name.startswith("-"):
            more["nargs"] = {"[": "*" if several else "?"}.get(spec[0], "+" if several else None)
            name, metavar = more.pop("dest", name.lower()), name
        elif not metavar and "choices" not in more:
            self.add_argument(name, action="store_true", help=about)
            return
        elif commas or "," in metavar:
            kind = separated(kind)
            more |= {"nargs": "+", "action": Listed}
        elif several:
            more |= {"nargs": "+", **({"action": "extend"} if extend and not default else {})}
        elif " " in metavar:
            more["nargs"] = len(metavar.split())
        if default not in (None, (), [], "") and "default" not in about:
            values = default if isinstance(default, tuple | list) else [default]
            shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
            about = f"{about} (default: {shown})".lstrip()
        more |= {} if kind is None else {"type": kind}
        words = tuple(metavar.split()) if isinstance(more.get("nargs"), int) else metavar or None
        self.add_argument(name, metavar=words, default=default, help=about, **more)

    def fields(
        self,
        kind: type,
        names: str = "",
        *,
        without: str = "",
        make: str = "",
        title: str = "",
        **changes: Mapping[str, Any],
    ) -> None:
        """Add flags for the options of a dataclass and its sections; their fields define the flags.

        Args:
          kind: The dataclass; `chosen` makes one from the flags.
          names: Option names separated by blanks; default: all.
          without: Names of options that get no flag.
          make: Parameter for which `call` passes the dataclass made from the flags.
          title: Group of the flags on the help page, if `help_pages.GROUPS` does not name it.
          changes: Attributes of :class:`prb_jax.records.options.Option` that differ for this verb, by option name.
        """
        known = {key.rpartition(".")[2]: option for key, option in options_of(kind).items()}
        for name in names.split() or [name for name in known if name not in without.split()]:
            option = replace(known[name], **changes.get(name, {}))
            parts = get_args(option.kind) if get_origin(option.kind) is tuple else ()
            of_value = parts[0] if parts else option.kind
            is_number = of_value in (int, float)
            no_value = of_value is bool or option.choices
            shown = option.shown or ("" if no_value else "N" if is_number else "TEXT")
            more: dict[str, Any] = {"choices": option.choices} if option.choices else {}
            number = number_type(option, of_value) if is_number else None
            commas = bool(is_number or option.choices) and shown.endswith(" ...")
            flag = option.flag or name.replace("_", "-")
            if title:
                self.titles[flag.replace("-", "_")] = title
            self.option(
                f"--{flag} {shown}".rstrip(),
                option.meaning,
                number,
                commas=commas,
                default=list(option.default) if isinstance(option.default, tuple) else option.default,
                **more,
            )
        if make:
            self.made[make] = partial(chosen, kind=kind)

    def data(self, *, about: str = "Data sources, see `prb evaluate`", required: bool = True) -> None:
        """Add `--data`, `--subset` and `--limit`."""
        self.option("--data NAME_OR_PATH ...", about, required=required)
        self.option("--subset S", "One subset of the data")
        self.option("--limit N", "Only the first N comparisons of each source", positive)

    def columns(self) -> None:
        """Add `--columns` and `--rendered`, for `with_columns`."""
        self.option(
            "--columns FIELD=COLUMN ...",
            "Fields with other names in the data, e.g. user_id=voter profile=posts; for other verbs and in "
            'configs, append them to the data name: "FILE?user_id=voter&profile=posts"',
            extend=False,
        )
        self.option(
            "--rendered",
            "Use prompts and responses as they are, already rendered by a chat template; for other verbs append it to "
            'the data name: "FILE?rendered"',
        )

    def history(self) -> None:
        """Add `--history`."""
        self.option("--history NAME_OR_PATH ...", f"{HISTORY} (default: only their posts)")

    def prompt(self, *, of: str, rows: str = "") -> None:
        """Add options for the input of a verb's language model (`of`), and for its texts (`rows`) drawn at a time."""
        about = f"Posts of the user's profile that the {of} sees"
        self.option("--profile-posts N", about, not_negative, default=10)
        about = f"Most tokens of prompt and {rows or 'response'} (default: the model's)"
        self.option("--max-length L", about, positive)
        if rows:
            self.option("--rows N", f"{rows}s drawn at a time", positive)

    def endpoint(self) -> None:
        """Add the options of a language model behind an endpoint, which `call` passes as `endpoint`."""
        from prb_jax.scoring.remote.options import EndpointOptions, endpoint_options

        options = "url model concurrency prices length_field no_temperature"
        self.fields(EndpointOptions, options, title=ENDPOINT)
        names = ("price", "concurrency", "length_field", "no_temperature")
        self.made["endpoint"] = lambda options: endpoint_options(
            options.endpoint, options.model, **{name: getattr(options, name) for name in names}
        )

    def judge(self) -> None:
        """Add options of judges used as rewards, for `asked_judge`."""
        from prb_jax.behaviour.judges.options import OF_REWARDS as OF_JUDGES
        from prb_jax.behaviour.judges.options import JudgeOptions

        pairing = (
            "Pairing of pairs:MODEL: all pairs of a prompt's responses (default), each with the next one "
            "(circular), or winners only (knock-out)"
        )
        self.fields(
            JudgeOptions,
            OF_JUDGES,
            title=JUDGES,
            template={"meaning": "Template of judge:MODEL, see `prb judge`"},
            system={
                "meaning": "System turn of judge:MODEL, or of a generative reward model, see `prb judge`"
            },
            top_logprobs={"meaning": "Log-probabilities of judge:URL#NAME, see `prb judge`"},
            pairing={"meaning": pairing},
            min_mass={
                "meaning": "Least probability of A and B together for a verdict of pairs:MODEL, read at its logits "
                "(default: 0.1)"
            },
            ties={
                "meaning": "Ties of pairs:MODEL: half a win for both (default), a loss for both, or missing"
            },
        )

    def part(self, does: str) -> None:
        """Add `--part`; `does` is the verb's action on a part."""
        about = f"{does} only part I of N, as one of N jobs; `prb merge` makes one run of them"
        self.option("--part I/N", about)

    def long_run(self, kept: str, *, distributed: bool = True) -> None:
        """Add `--no-progress` and `--distributed`; an interrupted run prints ``kept``."""
        self.set_defaults(after_interrupt=kept)
        self.option("--no-progress", "Show no progress")
        if distributed:
            about = "Run as one of several processes (TPU pod, Slurm, GKE), all started with the same command"
            self.option("--distributed", about)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse like argparse, but optional words may also follow flags."""
        self.usage = self.usage or self._short_usage()
        optional = any(action.nargs in ("?", "*") for action in self._get_positional_actions())
        if self._intermixed or not optional:
            return super().parse_known_args(args, namespace)
        self._intermixed = True  # the method below calls this method
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse, and reject unknown words with a hint to the verb's nearest flag."""
        first = args[0] if args else ""
        if first.startswith("-") and first.partition("=")[0] not in self._option_string_actions:
            self.error(f"unrecognized arguments: {first}{self._hint_to(first)}")
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            verb: Parser = getattr(options, "parser", self)
            verb.error(f"unrecognized arguments: {' '.join(unknown)}{verb._hint_to(unknown[0])}")
        return options

    def _hint_to(self, word: str) -> str:
        """Return the end of an error about an unknown word: its remedy, if one is likely."""
        positional = self._get_positional_actions()
        if not word.startswith("-"):
            shown = " ".join(str(action.metavar or action.dest) for action in positional)
            return f"; expected {shown and f'only {shown} and '}flags"
        name = word.partition("=")[0]
        if near := _hint(name, self._option_string_actions):
            return near
        if any(action.dest == "overrides" for action in positional):
            return f"; a key of the config is written KEY=VALUE: {name.lstrip('-')}=VALUE"
        return ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(value, list):
            for one in value:
                self._check_value(action, one)
            return
        if action.choices is None or value in action.choices:
            return
        known, hint = ", ".join(map(str, action.choices)), _hint(str(value), map(str, action.choices))
        if isinstance(action, argparse._SubParsersAction):
            few = len(action.choices) <= _FEW_VERBS
            if f"--{value}" in self._option_string_actions:
                hint = f"; did you mean --{value}?"
            self.error(f"unknown verb {value!r}{hint or (f'; expected one of {known}' if few else '')}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint} (choose from {known})")

    def format_help(self) -> str:
        """Return the page of `--help`."""
        return self.page()

    def page(self, *, everything: bool = False) -> str:
        """Return the help page; if ``everything``, explain the rare options of a long page too."""
        return help_page(self, self.usage or self._short_usage(), self.titles, self.needed, everything)

    def _short_usage(self) -> str:
        words = [self.prog]
        for action in self._actions:
            choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest
            shown = action.metavar if isinstance(action.metavar, str) else choices
            if not action.option_strings:
                optional = action.nargs in ("?", "*") and action.dest not in self.needed
                shown += " ..." if action.nargs in ("*", "+") else ""
                words.append(f"[{shown}]" if optional else shown)
            elif action.required or action.dest in self.needed:
                words.append(f"{action.option_strings[0]} {shown}{' ...' if action.nargs == '+' else ''}")
        return " ".join([*words, "[options]"])

    def require(self, missing: Sequence[str]) -> None:
        """End the process with status 2 if arguments are missing; the message names them as in the usage."""
        if missing:
            self.error(f"the following arguments are required: {', '.join(missing)}")

    def error(self, message: str) -> NoReturn:
        """End the process with status 2, after a one-line message."""
        self.exit(2, f"prb: error: {printable(message)} (see `{self.prog} --help`)\n")


def _hint(word: str, known: Any) -> str:
    names = {name.lstrip("-"): name for name in reversed(list(known))}
    near = difflib.get_close_matches(word.lstrip("-"), names, n=1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Rewrite `--profile_posts=3` as `--profile-posts=3`; values stay as they are."""
    spelled = list(arguments)
    end = spelled.index("--") if "--" in spelled else len(spelled)
    for position, argument in enumerate(spelled[:end]):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            spelled[position] = flag.replace("_", "-") + equals + value
    return spelled


def chosen(options: argparse.Namespace, kind: type[Options], **more: Any) -> Options:
    """Return a dataclass of options with the values of its fields' flags; `more` are fields without a flag."""
    flags, values = vars(options), dict[str, Any]()
    for key, option in options_of(kind).items():
        name = key.rpartition(".")[2]
        flag = (option.flag or name).replace("-", "_")
        if flag in flags:
            values[name] = tuple(flags[flag]) if isinstance(flags[flag], list) else flags[flag]
    return from_flat(kind, values | more)


def asked_judge(options: argparse.Namespace, **more: Any) -> JudgeOptions | None:
    """Return the options of judges used as rewards from the flags of `Parser.judge`; None without any flag."""
    from prb_jax.behaviour.judges.options import OF_REWARDS as OF_JUDGES
    from prb_jax.behaviour.judges.options import JudgeOptions

    asked = JudgeOptions(**{name: getattr(options, name) for name in OF_JUDGES.split()}, **more)
    return None if asked == JudgeOptions() else asked


def keywords(function: Callable[..., Any], options: argparse.Namespace, /, **more: Any) -> dict[str, Any]:
    """Return the options of a command line that are parameters of a function; `more` takes precedence."""
    parameters = inspect.signature(function).parameters
    made: Mapping[str, Any] = options.parser.made if "parser" in options else {}
    named = {**vars(options), "progress": not getattr(options, "no_progress", False), **more}
    named |= {name: make(options) for name, make in made.items() if name in parameters and name not in more}
    return {name: named[name] for name in parameters if name in named}


def call(function: Callable[..., Result], options: argparse.Namespace, /, **more: Any) -> Result:
    """Call a function with the :func:`keywords` of a command line."""
    return function(**keywords(function, options, **more))


def given_flags(options: argparse.Namespace) -> set[str]:
    """Return the flags of a command line whose values differ from their defaults."""
    given: set[str] = set()
    for action in options.parser._actions:
        if getattr(options, action.dest, action.default) != action.default:
            given.update(action.option_strings)
    return given


def with_columns(source: str, options: argparse.Namespace) -> str:
    """Return a source name with its columns appended, in the form of `prb_jax.records.intake`."""
    parts = [*(options.columns or ()), *(["rendered"] if options.rendered else [])]
    return f"{source}?{'&'.join(parts)}" if parts else source
