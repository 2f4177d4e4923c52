"""The verbs of the command line: for each one function adds its arguments, and one calls the library and prints.

To add one, write such a file and name the verb in `VERBS`.
"""

from collections.abc import Callable
from importlib import import_module

VERBS = {
    "evaluate": {
        "quickstart": "a first table: two small reward models trained and evaluated in minutes",
        "evaluate": "score comparisons with a reward model or a baseline",
        "merge": "make one run of the parts of a command with --part",
        "judge": "let a language model choose between two responses, or rate each",
        "aspects": "let a language model write what each user wants, for --aspects",
    },
    "train": {
        "train": "train a reward model",
        "convert": "write a training run or a checkpoint as a Hugging Face folder, or data for other trainers",
        "push": "upload the model of a run to the Hugging Face hub, with a card",
    },
    "personalise": {
        "features": "write a model's states at every response and post of a data set",
        "personalise": "compare methods that learn a person's taste from few comparisons",
        "methods": "list the methods of personalisation, for --methods of prb personalise",
        "ask": "which question to put to a person next, and what its answer tells",
        "rank-profiles": "order each user's posts by their relevance to the question",
    },
    "behave": {
        "sample": "draw texts from a language model for the prompts of a data set",
        "best-of-n": "how good the best of k samples is, as reward models choose it",
        "distil": "write samples and their rewards as training data: the best against a worse one",
        "guide": "draw texts that a reward model guides token by token, or chunk by chunk",
        "policy-accuracy": "how often a guided policy gives the preferred response the higher score",
        "correlate": "does a benchmark predict a behaviour? intervals and tests",
        "ppo": "train a language model by a reward",
    },
    "build": {
        "build": "build a personalised benchmark, and show by gates that it is sound",
        "personas": "write the generated benchmark as JSON lines",
        "past-texts": "write preference pairs from texts that people wrote themselves",
        "prepare": "check and tokenise a large data set once, for random access",
        "split": "write a data set as parts without a common user, or question",
        "audit": "let people judge pairs on a local page, and tell how much they agree",
    },
    "serve": {"serve": "answer HTTP requests for scores"},
    "look": {
        "inspect": "say what a checkpoint is and check it, without reading its weights",
        "compare": "compare finished runs on the same data: paired differences, tests",
        "leaderboard": "show all runs of prb evaluate below a folder in one table",
        "report": "write a page about runs: figures, comparisons, pairs to read",
        "plan": "does a model fit a TPU slice, and how fast? no TPU is needed",
        "bench": "time scoring, training, sampling, serving or loading on this machine",
        "completion": "print a script that completes prb in your shell",
    },
}
"""Every verb, by what it is for. Its functions `add` and `run` are in the file of its name, but for SHARED."""

SHARED = {
    "quickstart": "first_steps",
    "completion": "first_steps",
    "merge": "evaluate",
    "aspects": "judge",
    "ppo": "train",
    "audit": "build",
    **dict.fromkeys(("inspect", "convert", "serve"), "one_model"),
    **dict.fromkeys(("compare", "leaderboard", "report", "correlate", "push"), "runs"),
    **dict.fromkeys(("personas", "past-texts", "prepare", "split", "rank-profiles"), "datasets"),
    **dict.fromkeys(("features", "methods", "ask"), "personalise"),
    **dict.fromkeys(("best-of-n", "distil", "guide", "policy-accuracy"), "sample"),
}
"""The file of a verb that shares it with others; its functions there are `add_VERB` and `run_VERB`."""


def functions_of(verb: str) -> tuple[Callable[..., None], Callable[..., int | None]]:
    """Return what adds the arguments of a verb to a parser, and what runs it and returns its status, None for 0."""
    name = verb.replace("-", "_")
    module = import_module(f"prb_jax.commands.{SHARED.get(verb, name)}")
    ending = f"_{name}" if verb in SHARED else ""
    return getattr(module, f"add{ending}"), getattr(module, f"run{ending}")
