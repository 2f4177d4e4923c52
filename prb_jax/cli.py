"""The command `prb`: its parser, its exit statuses and its error line.

Heavy imports wait until the verb is known: `prb --help` does not start JAX.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from prb_jax.commands import COMPUTING, VERBS, functions_of
from prb_jax.commands.arguments import Parser, with_dashes
from prb_jax.commands.process import (
    Terminated,
    drop_output,
    open_streams,
    replace_unknown_letters,
    start_with_huge_pages,
    until_terminated,
    warnings_as_lines,
)
from prb_jax.errors import PrbError, RunError, printable
from prb_jax.platform.paths import names_url, shown
from prb_jax.platform.processes.job import INTERRUPTED, INTERRUPTED_BY_USER, leave_job
from prb_jax.platform.processes.refusals import refuse_together
from prb_jax.platform.storage.urls import localise_options, names_in_output, session
from prb_jax.plugins import import_plugins
from prb_jax.runs.kind import set_command_line
from prb_jax.version import __version__

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 141

_HELP = """\
usage: prb VERB [options]

{about}

first steps:
  prb quickstart                                          a first table, from nothing, in minutes
  prb evaluate MODEL --data pairs.jsonl --out runs/first  how often does MODEL prefer what the user prefers?
  prb report runs/first --out page.html                   a page to read
  prb compare runs/first runs/second                      which of two models is better?
  prb train bt_profile_context model=MODEL data=pairs.jsonl --out runs/mine

{verbs}
`prb VERB --help` explains a verb, and `--help-all` its rare options too; `prb --version` prints the version.
"""


class _AllVerbs(Parser):
    """The parser of `prb` itself, whose help shows the verbs in groups."""

    def format_help(self) -> str:
        """Return the first steps and every verb."""
        (verbs,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        lines = {line.dest: line for line in verbs._choices_actions}
        formatter = self._get_formatter()
        for group, names in VERBS.items():
            formatter.start_section(group)
            formatter.add_arguments([lines[name] for name in names])
            formatter.end_section()
        return _HELP.format(about=self.description, verbs=formatter.format_help())


def parser(only: str | None = None) -> Parser:
    """Return the parser with the arguments of all verbs, or of one. Flags may have dashes or underscores."""
    top = _AllVerbs(prog="prb", description="Evaluate and train reward models for individual people, on JAX.")
    top.add_argument("--version", action="version", version=f"prb {__version__}")
    top.set_defaults(after_interrupt="nothing was kept", distributed=False, command_line=top)
    group = top.add_subparsers(title="verbs", metavar="VERB", required=True, parser_class=Parser)
    for verbs in VERBS.values():
        for name, about in verbs.items():
            sub = group.add_parser(name, help=about, description=about)
            if only in (None, name):
                add, run = functions_of(name)
                sub.set_defaults(run=run, parser=sub)
                add(sub)
                about = "Module, or file, that registers plug-ins; may be repeated"
                sub.add_argument(
                    "--import", dest="imports", action="append", default=[], metavar="MODULE", help=about
                )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status.

    The status is 0 for success, and 2 for anything the user can correct (one line on standard error). It is 75 for a
    run that SIGTERM stopped and the same command continues, and 130 for Ctrl-C. In a job of several processes, a
    process that ends early does not return.
    A table that cannot be printed (e.g. on a full disk) is an error, 2, because the reader of standard output would
    miss it. The run folder is still complete, and the same command prints the table again. If standard output is
    closed from the start, the status is 0.
    """
    if argv is None:
        if sys.argv[1:2] and sys.argv[1] in COMPUTING and not {"--help", "-h"} & {*sys.argv}:
            start_with_huge_pages()
        open_streams()
    arguments = with_dashes(sys.argv[1:] if argv is None else argv)
    if any(not argument or (argument.startswith("--") and argument.endswith("=")) for argument in arguments):
        parser().error("an argument is empty: expected a value (is a variable of the shell not set?)")
    only = None if arguments[:1] == ["completion"] else "".join(arguments[:1])
    options = parser(only).parse_args(arguments)
    options.words = arguments
    set_command_line(["prb", *arguments])
    options.own_process = argv is None
    replace_unknown_letters()
    try:
        os.getcwd()
        import_plugins(options.imports)
        with (
            warnings_as_lines(),
            session(distributed=options.distributed) as storage,
            names_in_output(),
            until_terminated(options),
        ):
            refuse_together(
                endpoint=getattr(options, "endpoint", None),
                part=getattr(options, "part", None),
                together=options.distributed and options.words[0] != "evaluate",
            )
            _localise(options)
            status = options.run(options) or 0
            storage.finish = status == 0
        sys.stdout.flush()
        return status
    except PrbError as error:
        return _ended(EXIT_USER_ERROR, f"error: {error}")
    except KeyboardInterrupt:
        return _ended(INTERRUPTED_BY_USER, f"interrupted; {options.after_interrupt}")
    except Terminated:
        return _ended(INTERRUPTED, f"SIGTERM; {options.after_interrupt}")
    except BrokenPipeError:  # the reader of our output has closed it, e.g. `prb ... | head`
        drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _in_a_folder():
            return _ended(EXIT_USER_ERROR, "error: the working directory was removed: change to another one")
        try:
            print(flush=True)  # if this fails too, standard output caused the error
        except OSError:
            drop_output()
            text = f"error: cannot write to standard output: {error.strerror}; run folders and files are complete"
            return _ended(EXIT_USER_ERROR, text)
        raise
    finally:
        set_command_line(())


def _localise(options: argparse.Namespace) -> None:
    """Replace URLs of object storage by local paths."""
    given = {name: value for name, value in vars(options).items() if name != "words" and names_url(value)}
    verb = options.words[0]
    if verb == "audit" and "folder" in given:
        raise RunError(
            f"audit: {options.folder}: its judgements are a database, which needs a local file system: use a local "
            "folder, and copy its exports"
        )
    if options.distributed and verb in ("train", "ppo") and "out" in given:
        raise RunError(
            f"--distributed: every process of prb {verb} writes a part of each checkpoint, so --out must be a folder "
            f"that all of them see, as a mounted bucket; found {options.out}"
        )
    localise_options(options)


def _in_a_folder() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _ended(status: int, text: str) -> int:
    """Print one line on standard error and return the status; in a job of several processes the others end too."""
    text = printable(shown(text))
    leave_job(status, text)
    print(f"prb: {text}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
