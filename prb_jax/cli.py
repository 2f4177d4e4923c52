"""The command `prb`: parses arguments and calls the library.

Nothing heavy is imported before it is known what to do: `prb --help` starts no JAX.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from prb_jax.commands.config_option import add_config, with_config
from prb_jax.commands.model_options import add_attention, add_quantize
from prb_jax.errors import PrbError, PrbWarning, RunError, printable
from prb_jax.processes.job import INTERRUPTED, INTERRUPTED_BY_USER, leave_job, start_job
from prb_jax.processes.sharing import process_index
from prb_jax.version import __version__

if TYPE_CHECKING:
    from prb_jax.scoring.evaluate import Evaluation

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 141
_LOG_WIDTH = 120

Verb = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit status.

    0 done, 2 for anything the user can put right (one line on standard error), 75 for a run that SIGTERM stopped and
    the same command continues, 130 for Ctrl-C. Of several processes, one that ends before its time does not return.
    A table that cannot be printed (a full disk) is an error, 2, for the reader of standard output would miss it; a
    run folder is complete nevertheless, and the same command prints it again. Where standard output is closed from
    the start nobody reads it: 0.
    """
    if argv is None:
        _open_streams()
    arguments = _dashes(sys.argv[1:] if argv is None else argv)
    if any(not argument or (argument.startswith("--") and argument.endswith("=")) for argument in arguments):
        parser().error("an argument is empty: expected a value (is a variable of the shell not set?)")
    options, rest = parser().parse_known_args(arguments)
    words = [argument for argument in rest if not argument.startswith("-")]
    if options.verb is _train:  # its words may also stand behind flags
        options.overrides += words
    elif options.verb is _evaluate and options.model is None and len(words) == 1:
        options.model = words[0]
    else:
        words = []
    rest = [argument for argument in rest if argument not in words]
    if rest and options.verb is not _bench:
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    options.command = ["prb", *arguments]
    options.own_process = argv is None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter is no reason to fail
    try:
        os.getcwd()
        with _warnings_as_lines():
            status = options.verb(options)
        sys.stdout.flush()
        return status
    except PrbError as error:
        return _ended(EXIT_USER_ERROR, f"error: {error}")
    except KeyboardInterrupt:
        return _ended(INTERRUPTED_BY_USER, f"interrupted; {options.after_interrupt}")
    except _Terminated:
        return _ended(INTERRUPTED, f"SIGTERM; {options.after_interrupt}")
    except BrokenPipeError:  # the reader of our output left, as `prb ... | head` does
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _in_a_folder():
            return _ended(EXIT_USER_ERROR, "error: the working directory was removed: change to another one")
        try:
            print(flush=True)  # where this fails too, it is standard output that failed
        except OSError:
            _drop_output()
            text = f"error: cannot write to standard output: {error.strerror}; run folders and files are complete"
            return _ended(EXIT_USER_ERROR, text)
        raise


def _open_streams() -> None:
    """Open the standard streams that are closed: a file would get their number, and what is printed."""
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_a_folder() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Our own warnings as one line each, of several processes from the first; others as they are."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if not issubclass(category, PrbWarning):
            shown(message, category, *place)
        elif process_index() == 0:
            print(f"prb: warning: {printable(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", PrbWarning)
        warnings.showwarning = show
        yield


class _Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def _until_terminated(options: argparse.Namespace) -> Iterator[None]:
    """SIGTERM as an exception, so that it is answered as Ctrl-C is; only where the process is ours."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    if not options.own_process:
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _ended(status: int, text: str) -> int:
    """The exit status, after one line on standard error; of several processes, the others end too."""
    leave_job(status, text)
    print(f"prb: {printable(text)}", file=sys.stderr)
    return status


def parser() -> argparse.ArgumentParser:
    """The whole command line. Flags may be spelled with dashes or underscores."""
    top = _Parser(prog="prb", description="Evaluate and train reward models for individual people, on JAX.")
    top.add_argument("--version", action="version", version=f"prb {__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_evaluate(verbs)
    _add_train(verbs)
    _add_convert(verbs)
    _add_inspect(verbs)
    _add_personas(verbs)
    _add_prepare(verbs)
    _add_rank_profiles(verbs)
    _add_quickstart(verbs)
    _add_bench(verbs)
    _add_plan(verbs)
    _add_completion(verbs)
    return top


class _Parser(argparse.ArgumentParser):
    """Errors in our own spelling, and no abbreviated flags: a new flag must not change an old command."""

    def __init__(self, **options: object) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)  # pyright: ignore[reportArgumentType]

    def error(self, message: str) -> NoReturn:
        print(f"{self.format_usage()}prb: error: {printable(message)}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR)


def _dashes(arguments: Sequence[str]) -> list[str]:
    """`--profile_posts=3` as `--profile-posts=3`; values stay as they are."""
    spelled = list(arguments)
    end = spelled.index("--") if "--" in spelled else len(spelled)
    for position, argument in enumerate(spelled[:end]):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            spelled[position] = flag.replace("_", "-") + equals + value
    return spelled


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, found {text}")
    return number


def _add_verb(verbs: argparse._SubParsersAction, name: str, verb: Verb, *, about: str) -> _Parser:
    sub = verbs.add_parser(name, help=about, description=about)
    sub.set_defaults(verb=verb, after_interrupt="nothing was kept")
    return sub


def _add_evaluate(verbs: argparse._SubParsersAction) -> None:
    from prb_jax.benchmarks import NAMES

    sub = _add_verb(
        verbs, "evaluate", _evaluate, about="score comparisons with a model; the same command continues a run"
    )
    sub.set_defaults(after_interrupt="what was scored is kept: the same command continues the run")
    sub.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="hub id, Hugging Face folder, or baseline:length, baseline:random, baseline:profile-overlap",
    )
    sub.add_argument(
        "--data",
        metavar="NAME_OR_PATH",
        nargs="+",
        action="extend",
        help=f"benchmark NAME or NAME:PATH ({', '.join(NAMES)}), .jsonl(.gz), .json, .csv or .parquet file, folder, "
        "hub data set, personas[:PART]; repeatable",
    )
    sub.add_argument("--out", metavar="DIR", help="run folder: run.json, scores.jsonl, summary.json")
    sub.add_argument("--subset", metavar="S", help="one subset of the data")
    sub.add_argument(
        "--profile-posts",
        metavar="N",
        type=_not_negative,
        help="posts of the user's profile that the model sees (default: as in training; where the model does not "
        "say, 10, and 0 for the paper protocol)",
    )
    sub.add_argument("--protocol", choices=("default", "paper"), help="(default: as in training, or default)")
    sub.add_argument(
        "--max-length",
        metavar="L",
        type=_positive,
        help="longest conversation in tokens (default: as in training, or the model's)",
    )
    sub.add_argument(
        "--too-long",
        choices=("error", "skip"),
        default="error",
        help="what a response is that leaves no room for its prompt within that: an error (default), or left out, "
        "counted in summary.json and named in left_out.jsonl",
    )
    sub.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's")
    _add_quantize(sub)
    add_attention(sub)
    sub.add_argument(
        "--no-reference",
        action="store_true",
        help="with --quantize: do not score the same rows with the unquantised model too",
    )
    sub.add_argument("--mesh", metavar="M", help="as fsdp=4,tensor=2 (default: all devices)")
    sub.add_argument(
        "--limit",
        metavar="N",
        type=_positive,
        help="the first N comparisons of each source; for testing only",
    )
    sub.add_argument("--batch-tokens", metavar="N", type=_positive, help="tokens computed at a time")
    _add_model_options(sub)
    sub.add_argument(
        "--seed", metavar="N", type=_not_negative, default=0, help="of the bootstrap (default: 0)"
    )
    sub.add_argument("--no-progress", action="store_true", help="show no progress")
    _add_distributed(sub)
    add_config(sub)
    sub.set_defaults(parser=sub)


def _add_quantize(sub: argparse.ArgumentParser) -> None:
    add_quantize(sub, about="matrices of the layers in eight bits; int8 and fp8 quantise activations too")


def _add_model_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--revision", metavar="R", help="branch, tag or commit on the hub")
    sub.add_argument(
        "--tokenizer", metavar="T", help="folder or hub id of the tokenizer (default: the model's)"
    )
    sub.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or plain; for models without one")
    sub.add_argument(
        "--readout",
        metavar="NAME",
        help="a row of the table of reward models; qwen2-prm:min (product, mean, last), how the steps of a process "
        "model become one reward; vocabulary:ID; or which logit of several is the reward: first-logit, last-softmax",
    )


def _evaluate(options: argparse.Namespace) -> int:
    options = with_config(options, options.parser, required=("model", "data", "out"))
    with _until_terminated(options):
        baseline = options.model.startswith("baseline:")
        if not baseline and options.own_process:
            _hide_torch()
        if not baseline or options.distributed:
            _prepare_jax(distributed=options.distributed, after_interrupt=options.after_interrupt)
        from prb_jax.report.table import render_summary

        result = _evaluated(options)
    if process_index() == 0:
        title = " ".join(options.data) + (f", --limit {options.limit}: testing only" if options.limit else "")
        _print(render_summary({result.summary["model"]: result.summary}, title=title))
        print(f"written to {result.out}")
    return 0


def _evaluated(options: argparse.Namespace) -> "Evaluation":
    from prb_jax.scoring.by_name import evaluate

    return evaluate(
        options.model,
        options.data,
        out=options.out,
        profile_posts=options.profile_posts,
        protocol=options.protocol,
        max_length=options.max_length,
        too_long=options.too_long,
        subset=options.subset,
        limit=options.limit,
        seed=options.seed,
        mesh=options.mesh,
        dtype=options.dtype,
        revision=options.revision,
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        readout=options.readout,
        quantize=options.quantize,
        attention=options.attention,
        reference=False if options.no_reference else None,
        batch_tokens=options.batch_tokens,
        progress=not options.no_progress,
        command=options.command,
    )


def _add_train(verbs: argparse._SubParsersAction) -> None:
    sub = _add_verb(verbs, "train", _train, about="train a reward model; the same command continues a run")
    sub.set_defaults(after_interrupt="the checkpoints are kept: the same command continues the run")
    sub.add_argument(
        "config", metavar="CONFIG", nargs="?", help="Python, YAML or TOML file, as configs/bt_user_blind.py"
    )
    sub.add_argument(
        "overrides",
        metavar="KEY=VALUE",
        nargs="*",
        help="as model=PATH data=FILE steps=100 optimizer.learning_rate=3e-4",
    )
    sub.add_argument("--out", metavar="DIR", help="run folder: train.json, metrics.jsonl, checkpoints, model")
    sub.add_argument("--no-progress", action="store_true", help="show no progress")
    sub.add_argument(
        "--show-config",
        action="store_true",
        help="print a YAML config of every option with its meaning, and train nothing",
    )
    sub.set_defaults(parser=sub)
    _add_distributed(sub)


def _add_distributed(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes (TPU pod, Slurm, GKE), each started with this same command",
    )


def _train(options: argparse.Namespace) -> int:
    given = [word for word in (options.config, *options.overrides) if word is not None]
    is_config = bool(given) and ("=" not in given[0] or Path(given[0]).is_file())
    config, overrides = given[0] if is_config else None, given[is_config:]
    if options.show_config:
        from prb_jax.training.config import load_settings
        from prb_jax.training.meanings import explained_settings

        print(explained_settings(load_settings(config, overrides, complete=False)), end="")
        return 0
    if config is None or options.out is None:
        missing = [name for name, value in (("CONFIG", config), ("--out", options.out)) if value is None]
        return options.parser.error(f"the following arguments are required: {', '.join(missing)}")
    if options.own_process:
        _hide_torch()
    with _until_terminated(options):
        _prepare_jax(distributed=options.distributed, after_interrupt=options.after_interrupt)
        from prb_jax.report.training import training_table
        from prb_jax.training.train import train

        result = train(
            config,
            out=options.out,
            overrides=overrides,
            progress=not options.no_progress,
            command=options.command,
        )
    if result.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    if result.stopped_by is not None:
        return INTERRUPTED  # what was saved is said already
    if process_index() == 0:
        _print(training_table(result.summary, title=str(options.out)))
        print(f"written to {result.out}; `prb evaluate {result.out} --data ...` scores with it")
    return 0


def _add_convert(verbs: argparse._SubParsersAction) -> None:
    sub = _add_verb(
        verbs, "convert", _convert, about="write a training run or a checkpoint as a Hugging Face folder"
    )
    sub.add_argument("source", metavar="SRC", help="run of `prb train`, Hugging Face folder or hub id")
    sub.add_argument("target", metavar="DST", help="folder to be made")
    sub.add_argument(
        "--adapter", action="store_true", help="of a run with tuning=lora: a PEFT adapter with its head"
    )
    sub.add_argument(
        "--step", metavar="S", help="which checkpoint of a run: best, last or a number (default: best)"
    )
    sub.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights but the head")
    sub.add_argument(
        "--layout",
        choices=("standard", "value-head"),
        default="standard",
        help="of a checkpoint's head: *ForSequenceClassification, or v_head.summary as TRL and LLaMA-Factory have it",
    )
    sub.add_argument(
        "--drop-bias", action="store_true", help="leave out the bias of a value head: differences stay equal"
    )
    _add_model_options(sub)


def _convert(options: argparse.Namespace) -> int:
    if options.own_process:
        _hide_torch()
    _prepare_jax(distributed=False)
    from prb_jax.training.convert import convert

    folder = convert(
        options.source,
        options.target,
        adapter=options.adapter,
        step=options.step,
        dtype=options.dtype,
        revision=options.revision,
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        readout=options.readout,
        drop_bias=options.drop_bias,
        layout=options.layout,
    )
    print(f"written to {folder}")
    return 0


def _add_inspect(verbs: argparse._SubParsersAction) -> None:
    sub = _add_verb(
        verbs, "inspect", _inspect, about="check a checkpoint without reading its weights, and say what it is"
    )
    sub.add_argument("model", metavar="MODEL", help="hub id or Hugging Face folder")
    _add_quantize(sub)
    _add_model_options(sub)
    sub.add_argument(
        "--data",
        metavar="NAME_OR_PATH",
        nargs="+",
        action="extend",
        help="what `prb evaluate --data` takes: says how long it is for this model, and what is cut or refused",
    )
    sub.add_argument(
        "--max-length",
        metavar="L",
        type=_positive,
        help="longest conversation in tokens (default: as in training, or the model's; of the paper protocol 8,192)",
    )
    sub.add_argument("--protocol", choices=("default", "paper"), help="one of them (default: both)")
    sub.add_argument(
        "--profile-posts",
        metavar="N",
        type=_not_negative,
        help="with --data: posts of the user's profile (default: as in training, or 10; 0 for the paper protocol)",
    )
    sub.add_argument(
        "--limit", metavar="N", type=_positive, help="with --data: the first N comparisons of each source"
    )


def _inspect(options: argparse.Namespace) -> int:
    if options.own_process:
        _hide_torch()
    from prb_jax.inspection.decoder import inspect_model, load_report_table

    facts = inspect_model(
        options.model,
        revision=options.revision,
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        readout=options.readout,
        quantize=options.quantize,
        data=options.data,
        max_length=options.max_length,
        profile_posts=options.profile_posts,
        protocol=options.protocol,
        limit=options.limit,
    )
    _print(load_report_table(facts))
    return 0


def _add_personas(verbs: argparse._SubParsersAction) -> None:
    sub = _add_verb(
        verbs,
        "personas",
        _personas,
        about="write the generated benchmark as JSON lines, one file for each part",
    )
    sub.add_argument("--out", metavar="DIR", required=True, help="folder for the files")


def _personas(options: argparse.Namespace) -> int:
    from prb_jax.sources import personas

    for part, path in personas.write(options.out).items():
        print(f"{path}: {len(personas.load(part)):,} comparisons")
    return 0


def _add_prepare(verbs: argparse._SubParsersAction) -> None:
    sub = _add_verb(
        verbs,
        "prepare",
        _prepare,
        about="write comparisons as a data set of tensorflow-datasets (array_record, random access)",
    )
    sub.add_argument(
        "--data",
        metavar="NAME_OR_PATH",
        nargs="+",
        action="extend",
        required=True,
        help="what `prb evaluate --data` takes; repeatable",
    )
    sub.add_argument(
        "--split",
        metavar="S",
        nargs="+",
        default=["test"],
        help="splits of the data to read; they keep their names (default: test)",
    )
    sub.add_argument("--out", metavar="DIR", required=True, help="folder for it; then valid as --data DIR")


def _prepare(options: argparse.Namespace) -> int:
    from prb_jax.sources.prepare import prepare

    prepared = prepare(options.data, out=options.out, splits=options.split)
    for split, count in prepared.counts.items():
        print(f"{split}: {count:,} comparisons")
    print(f"written to {prepared.folder}")
    return 0


def _add_rank_profiles(verbs: argparse._SubParsersAction) -> None:
    sub = _add_verb(
        verbs,
        "rank-profiles",
        _rank_profiles,
        about="write the same comparisons with each user's posts ordered by relevance to the question",
    )
    sub.add_argument(
        "--encoder", metavar="E", required=True, help="bm25, recency, or a model: folder or hub id"
    )
    sub.add_argument("--data", metavar="NAME_OR_PATH", required=True, help="what `prb evaluate --data` takes")
    sub.add_argument("--out", metavar="FILE", required=True, help=".jsonl or .jsonl.gz")
    sub.add_argument(
        "--protocol",
        choices=("default", "paper"),
        default="default",
        help="paper: ids stay where they are while posts move, as in the paper's script",
    )
    sub.add_argument("--mesh", metavar="M", help="of a model: as data=4 (default: all devices)")
    sub.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of a model (default: the checkpoint's)"
    )
    sub.add_argument(
        "--max-length",
        metavar="L",
        type=_positive,
        help="of a model: longest text in tokens; what is longer loses its end (default: the model's)",
    )
    sub.add_argument("--revision", metavar="R", help="of a model: branch, tag or commit on the hub")
    sub.add_argument("--no-progress", action="store_true", help="show no progress")


def _rank_profiles(options: argparse.Namespace) -> int:
    from prb_jax.retrieval.rank_profiles import rank_profiles
    from prb_jax.retrieval.rankers import RANKERS

    if options.encoder not in RANKERS:
        if options.own_process:
            _hide_torch()
        _prepare_jax(distributed=False)
    ranked = rank_profiles(
        options.data,
        encoder=options.encoder,
        out=options.out,
        protocol=options.protocol,
        mesh=options.mesh,
        dtype=options.dtype,
        max_length=options.max_length,
        revision=options.revision,
        progress=not options.no_progress,
    )
    print(f"{ranked.path}: {ranked.records:,} comparisons, {ranked.profiles:,} with a ranked profile")
    if ranked.texts:
        print(
            f"{ranked.texts:,} distinct texts embedded, {ranked.truncated:,} of them cut to the encoder's length"
        )
    return 0


def _add_quickstart(verbs: argparse._SubParsersAction) -> None:
    sub = _add_verb(
        verbs,
        "quickstart",
        _quickstart,
        about="train two small reward models on the generated benchmark, evaluate them and the baselines: the first "
        "table, in minutes on two CPU cores; the same command continues it",
    )
    sub.set_defaults(after_interrupt="what was finished is kept: the same command continues")
    sub.add_argument("--out", metavar="DIR", default="runs/quickstart", help="default: runs/quickstart")
    sub.add_argument("--no-progress", action="store_true", help="show no progress")


def _quickstart(options: argparse.Namespace) -> int:
    if options.own_process:
        _hide_torch()
    _prepare_jax(distributed=False)
    from prb_jax.quickstart import quickstart, quickstart_table

    with _until_terminated(options):
        result = quickstart(out=options.out, progress=not options.no_progress, command=options.command)
    if result.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    if result.stopped_by is not None:
        return INTERRUPTED
    _print(quickstart_table(result.summary))
    print(f"written to {result.report} and {result.path}")
    return 0


def _add_bench(verbs: argparse._SubParsersAction) -> None:
    # Its arguments, --help too, are parsed where they are used.
    sub = verbs.add_parser(
        "bench", help="how fast a model scores, trains, loads or ranks on this machine", add_help=False
    )
    sub.set_defaults(verb=_bench, after_interrupt="nothing was kept")


def _bench(options: argparse.Namespace) -> int:
    _prepare_jax(distributed=False)
    from prb_jax.bench import main as bench

    return bench(options.rest)


def _add_plan(verbs: argparse._SubParsersAction) -> None:
    sub = _add_verb(
        verbs,
        "plan",
        _plan,
        about="does a model fit a TPU slice, and how fast: compiles for it, without a TPU",
    )
    sub.add_argument(
        "model", metavar="MODEL_OR_CONFIG", help="config.json, model folder, or a shape such as qwen3-8b"
    )
    sub.add_argument("--topology", metavar="T", required=True, help="as v5e:4x4 or v5p:2x2x4")
    sub.add_argument(
        "--slices", metavar="N", type=_positive, default=1, help="such slices, each with a copy (default: 1)"
    )
    sub.add_argument(
        "--mesh", metavar="M", help="as fsdp=4,tensor=4 (default: fsdp over all chips of a slice)"
    )
    sub.add_argument("--train", action="store_true", help="a training step's forward and backward pass")
    sub.add_argument("--tuning", choices=("head", "lora", "full"), help="with --train (default: full)")
    sub.add_argument("--remat", choices=("none", "dots", "full"), help="with --train (default: none)")
    sub.add_argument("--prefix", metavar="P", type=_positive, default=3840, help="tokens (default: 3840)")
    sub.add_argument("--responses", metavar="K", type=_positive, default=2, help="of a tree (default: 2)")
    sub.add_argument(
        "--response-length", metavar="R", type=_positive, default=128, help="tokens (default: 128)"
    )
    sub.add_argument("--batch", metavar="B", type=_positive, help="trees (default: 2 for each batch shard)")
    _add_quantize(sub)
    sub.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    sub.add_argument(
        "--sweep", action="store_true", help="try meshes and batch sizes: the best that fit come first"
    )
    sub.add_argument("--json", action="store_true", help="print one JSON object (of a sweep, the best)")


def _plan(options: argparse.Namespace) -> int:
    # No device is used: a program for TPUs is compiled on the CPU.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not options.train and (options.tuning or options.remat):
        raise RunError(f"--{'tuning' if options.tuning else 'remat'} is for training only: it needs --train")
    if options.train and options.quantize:
        raise RunError("--quantize is for scoring only: leave it out with --train")
    if options.sweep and options.mesh:
        raise RunError("--sweep tries meshes itself: leave out --mesh")
    from prb_jax.commands.plan import run

    shown = run(options)
    if shown is not None:
        _print(shown)
    return 0


def _add_completion(verbs: argparse._SubParsersAction) -> None:
    sub = _add_verb(verbs, "completion", _completion, about="print a script that completes prb in your shell")
    sub.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"))


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(parser(), options.shell))
    return 0


def _prepare_jax(*, distributed: bool, after_interrupt: str = "") -> None:
    """What must come before the first use of a device."""
    from prb_jax.commands.compilation_cache import enable_compilation_cache

    enable_compilation_cache()
    if distributed:
        start_job(after_interrupt=after_interrupt)
    from prb_jax.sharding import all_devices

    all_devices()  # that there are none is said before anything is read


def _hide_torch() -> None:
    """Answer "not installed" to transformers and datasets, which look for torch to import it: two seconds.

    An ``import torch`` of somebody else, as in a config file, still works.
    """
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: (
        None if name == "torch" else find_spec(name, package)
    )
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch


def _print(renderable: object) -> None:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    class Printable:  # cells hold names from data and configs
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
            for segment in console.render(renderable, options):  # pyright: ignore[reportArgumentType]
                yield segment._replace(text=printable(segment.text))

    # A log file has no width of its own, and 80 columns would fold the tables.
    in_file = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(width=_LOG_WIDTH if in_file else None).print(Printable())


if __name__ == "__main__":
    sys.exit(main())
