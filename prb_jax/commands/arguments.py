"""The parser of all verbs, and the arguments that several of them have."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from prb_jax.errors import printable
from prb_jax.models import ATTENTIONS, DTYPES, QUANTIZATIONS


class Parser(argparse.ArgumentParser):
    """Short usage, errors of one line, and no abbreviated flags: a new flag must not change an old command.

    Attributes:
      needed: names of options that are required, but may stand in a config file.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self.needed: tuple[str, ...] = ()
        self._intermixed = False

    def option(
        self,
        spec: str,
        about: str,
        kind: Callable[[str], Any] | None = None,
        *,
        default: Any = None,
        extend: bool = True,
        **more: Any,
    ) -> None:
        """Add an argument.

        Args:
          spec: as the usage shows it: "--flag" alone, "--flag VALUE", "--flag VALUE ..." for several, "NAME", "[NAME]"
            and "NAME ..." for words without a flag.
          about: the help; the default is written behind it.
          kind: of the value, which turns a text into it.
          default: where nothing is given.
          extend: a flag of several values may be repeated, and each adds to those before it.
          more: as of argparse.
        """
        several = spec.rstrip("]").endswith(" ...")
        name, _, metavar = spec.strip("[]").removesuffix(" ...").partition(" ")
        if not name.startswith("-"):
            more["nargs"] = {"[": "*" if several else "?"}.get(spec[0], "+" if several else None)
            name, metavar = more.pop("dest", name.lower()), name
        elif not metavar and "choices" not in more:
            self.add_argument(name, action="store_true", help=about)
            return
        elif several:
            more |= {"nargs": "+", **({"action": "extend"} if extend else {})}
        if default not in (None, (), [], "") and "default" not in about:
            values = default if isinstance(default, tuple | list) else [default]
            shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
            about = f"{about} (default: {shown})".lstrip()
        more |= {} if kind is None else {"type": kind}
        self.add_argument(name, metavar=metavar or None, default=default, help=about, **more)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse as argparse does, but words that may be left out may also stand behind flags."""
        self.usage = self.usage or self._short_usage()
        optional = any(action.nargs in ("?", "*") for action in self._get_positional_actions())
        if self._intermixed or not optional:
            return super().parse_known_args(args, namespace)
        self._intermixed = True  # the method below calls this one
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse, and refuse unknown words with the nearest flag of the verb."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            verb: Parser = getattr(options, "parser", self)
            near = difflib.get_close_matches(unknown[0].partition("=")[0], verb._option_string_actions, n=1)
            hint = f"; did you mean {near[0]}?" if near and unknown[0].startswith("-") else ""
            verb.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        near = difflib.get_close_matches(str(value), [str(choice) for choice in action.choices], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"unknown verb {value!r}{hint}")
        known = ", ".join(map(str, action.choices))
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{hint} (choose from {known})")

    def _short_usage(self) -> str:
        words = [self.prog]
        for action in self._actions:
            shown = action.metavar if isinstance(action.metavar, str) else action.dest
            if not action.option_strings:
                optional = action.nargs in ("?", "*") and action.dest not in self.needed
                words.append(f"[{shown}{' ...' if action.nargs == '*' else ''}]" if optional else shown)
            elif action.required or action.dest in self.needed:
                words.append(f"{action.option_strings[0]} {shown}{' ...' if action.nargs == '+' else ''}")
        return " ".join([*words, "[options]"])

    def require(self, missing: Sequence[str]) -> None:
        """End the process with status 2 where arguments are missing, which are named as the user writes them."""
        if missing:
            self.error(f"the following arguments are required: {', '.join(missing)}")

    def error(self, message: str) -> NoReturn:
        """End the process with status 2, after one line."""
        self.exit(2, f"prb: error: {printable(message)} (see `{self.prog} --help`)\n")


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Return `--profile_posts=3` as `--profile-posts=3`; values stay as they are."""
    spelled = list(arguments)
    end = spelled.index("--") if "--" in spelled else len(spelled)
    for position, argument in enumerate(spelled[:end]):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            spelled[position] = flag.replace("_", "-") + equals + value
    return spelled


def positive(text: str) -> int:
    """Return a number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return number


def positives(text: str) -> tuple[int, ...]:
    """Return numbers above 0, as in "1,5,15"."""
    try:
        return tuple(positive(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers as in 1,5,15, found {text!r}") from None


def not_negative(text: str) -> int:
    """Return a number that is 0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, found {text}")
    return number


def add_model_options(sub: Parser) -> None:
    """Add the options that say how a reward model is opened; `model_options` returns them."""
    add_policy_options(sub)
    sub.add_argument(
        "--readout",
        metavar="NAME",
        help="a row of the table of reward models; qwen2-prm:min (product, mean, last), how the steps of a process "
        "model become one reward; vocabulary:ID; or which logit of several is the reward: first-logit, last-softmax",
    )


def add_policy_options(sub: Parser) -> None:
    """Add the options that say how any model is opened; `policy_options` returns them."""
    sub.add_argument("--revision", metavar="R", help="branch, tag or commit on the hub")
    sub.add_argument(
        "--tokenizer", metavar="T", help="folder or hub id of the tokenizer (default: the model's)"
    )
    sub.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or plain; for models without one")


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_model_options` as keywords of the library."""
    return policy_options(options) | {"readout": options.readout}


def policy_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_policy_options` as keywords of the library."""
    return {name: getattr(options, name) for name in ("revision", "tokenizer", "chat_template")}


def add_columns(sub: Parser) -> None:
    """Add the option that names the columns of data which are not called as the fields of a record."""
    sub.add_argument(
        "--columns",
        metavar="FIELD=COLUMN",
        nargs="+",
        help="fields that have other names in the data, as user_id=voter profile=posts; for other verbs, and in "
        'configs, the name of the data ends in them: "FILE?user_id=voter&profile=posts"',
    )


def with_columns(source: str, columns: Sequence[str] | None) -> str:
    """Return the name of a source with its columns, as `prb_jax.sources.reading` takes it."""
    return f"{source}?{'&'.join(columns)}" if columns else source


def add_data(sub: Parser, *, about: str = "as of `prb evaluate`", required: bool = True) -> None:
    """Add `--data`, `--subset` and `--limit`."""
    sub.add_argument(
        "--data", metavar="NAME_OR_PATH", nargs="+", action="extend", required=required, help=about
    )
    sub.add_argument("--subset", metavar="S", help="one subset of the data")
    sub.add_argument("--limit", metavar="N", type=positive, help="the first N comparisons of each source")


def add_devices(sub: Parser, *, dtype: str = "the checkpoint's") -> None:
    """Add the options that say how a model computes; `device_options` returns them."""
    sub.add_argument("--dtype", choices=DTYPES, help=f"default: {dtype}")
    sub.add_argument("--mesh", metavar="M", help="as fsdp=4,tensor=2 (default: all devices)")
    add_quantize(sub)
    add_attention(sub)


def device_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_devices` as keywords of the library."""
    return {name: getattr(options, name) for name in ("mesh", "dtype", "quantize", "attention")}


def add_history(sub: Parser, *, otherwise: str = "their posts alone") -> None:
    """Add `--history`."""
    sub.add_argument(
        "--history",
        metavar="NAME_OR_PATH",
        nargs="+",
        action="extend",
        help="labelled comparisons of which a fitted method of personalisation learns the users, or a folder of their "
        f"saved states (default: {otherwise})",
    )


def add_aspects(sub: Parser) -> None:
    """Add `--aspects`."""
    sub.add_argument(
        "--aspects",
        metavar="planned:DIR|oracle",
        help="what the prompt says that the user wants: the texts of a run of `prb aspects`, or the true rubric (an "
        "upper bound, which no leaderboard shows among the results)",
    )


def add_endpoint(sub: Parser) -> None:
    """Add the options of a language model behind an endpoint; `endpoint_options` returns them."""
    sub.add_argument(
        "--endpoint",
        metavar="URL",
        help="instead: an API like OpenAI's, as https://HOST/v1; its key is read from PRB_ENDPOINT_KEY",
    )
    sub.add_argument("--model", metavar="NAME", help="of the model at the endpoint")
    sub.add_argument(
        "--concurrency", metavar="N", type=positive, default=8, help="requests at a time (default: 8)"
    )
    sub.add_argument(
        "--price",
        metavar="DOLLARS",
        type=float,
        nargs=2,
        help="of a million tokens of prompts and of replies, for the cost in summary.json",
    )


def endpoint_options(options: argparse.Namespace) -> Any:
    """Return the options of `add_endpoint` as the library takes them; None for no endpoint."""
    from prb_jax.judges.endpoint import endpoint_options

    return endpoint_options(
        options.endpoint, options.model, concurrency=options.concurrency, price=options.price
    )


def add_quantize(
    sub: Parser, *, about: str = "matrices of the layers in eight bits; int8 and fp8 quantise activations too"
) -> None:
    """Add `--quantize`."""
    sub.add_argument("--quantize", choices=QUANTIZATIONS, help=about)


def add_attention(sub: Parser) -> None:
    """Add `--attention`."""
    sub.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default="auto",
        help="the machine's own choice (default), the block-wise XLA program, our own kernel for GPUs "
        "(on TPUs: the splash kernel), or for scoring on TPUs a kernel over packed streams (paged)",
    )


def add_no_progress(sub: Parser) -> None:
    """Add `--no-progress`."""
    sub.add_argument("--no-progress", action="store_true", help="show no progress")


def add_distributed(sub: Parser) -> None:
    """Add `--distributed`."""
    sub.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes (TPU pod, Slurm, GKE), each started with this same command",
    )
