"""Verbs of the command line: for each verb one function adds its arguments, and another runs it and prints.

To add a verb, write such a file and list the verb in `VERBS`.
"""

from collections.abc import Callable
from importlib import import_module

VERBS = {
    "evaluate": {
        "quickstart": "a first table: two small reward models trained and evaluated in minutes",
        "evaluate": "score comparisons with a reward model or a baseline",
        "merge": "merge the parts of a command with --part into one run",
        "judge": "let a language model compare two responses, or rate each",
        "aspects": "let a language model write down what each user wants, for --aspects",
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
        "ask": "choose the next question for a person, by how much its answer teaches",
        "rank-profiles": "order each user's posts by their relevance to the question",
    },
    "behave": {
        "sample": "draw texts from a language model for the prompts of a data set",
        "best-of-n": "measure the quality of the best of k samples chosen by reward models",
        "distil": "turn samples and their rewards into training pairs: the best against a worse one",
        "guide": "draw texts guided by a reward model, token by token or chunk by chunk",
        "policy-accuracy": "measure how often a guided policy scores the preferred response higher",
        "correlate": "test how well a benchmark predicts a behaviour",
        "ppo": "train a language model with a reward",
    },
    "build": {
        "build": "build a personalised benchmark, and test it for faults",
        "personas": "write the generated benchmark as JSON lines",
        "past-texts": "write preference pairs from texts that people wrote themselves",
        "prepare": "check and tokenise a large data set once, for random access",
        "split": "split a data set into parts that share no user, or no question",
        "audit": "let people judge pairs on a local page, and measure their agreement",
    },
    "serve": {"serve": "answer HTTP requests for scores"},
    "look": {
        "inspect": "describe and check a checkpoint, without reading its weights",
        "compare": "compare finished runs on the same data: paired differences, tests",
        "leaderboard": "show all runs of prb evaluate below a folder in one table",
        "report": "write a page about runs: figures, comparisons, pairs to read",
        "plan": "check if a model fits a TPU slice, and how fast it runs; needs no TPU",
        "bench": "time scoring, training, sampling, serving or loading on this machine",
        "completion": "print a script that completes prb in your shell",
    },
}
"""Every verb, by purpose. Its functions `add` and `run` are in the file of its name, except for SHARED."""

COMPUTING = (
    "quickstart", "evaluate", "judge", "train", "features", "personalise", "rank-profiles", "sample", "best-of-n",
    "guide", "policy-accuracy", "ppo", "serve", "bench",
)  # fmt: skip
"""Verbs that run a model."""

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
"""File of a verb that shares it with others; its functions there are `add_VERB` and `run_VERB`."""


def functions_of(verb: str) -> tuple[Callable[..., None], Callable[..., int | None]]:
    """Return the function that adds a verb's arguments, and the function that runs it (exit status, or None for 0)."""
    name = verb.replace("-", "_")
    module = import_module(f"prb_jax.commands.{SHARED.get(verb, name)}")
    ending = f"_{name}" if verb in SHARED else ""
    return getattr(module, f"add{ending}"), getattr(module, f"run{ending}")
