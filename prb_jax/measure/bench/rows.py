"""Rows of `prb bench all`: the commands of `prb bench` that measure a machine, most important first."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prb_jax.measure.bench.machine import Machine
from prb_jax.models import REMAT_POLICIES

Rival = Literal["transformers", "transformers-cached", "trl", "vllm"]

# Weights of the layers' matrices, by shape.
_WEIGHTS = {
    "qwen3.5-40m": 0.04e9, "qwen3-40m": 0.04e9, "qwen3-0.6b": 0.6e9, "qwen3-1.7b": 1.7e9, "qwen3-4b": 4.0e9,
    "qwen3-8b": 8.2e9,
}  # fmt: skip
# Mixtures of experts: weights per token, and all weights.
_MIXTURES = {"qwen3-110m-a40m": (0.04e9, 0.11e9), "qwen3-30b-a3b": (3.3e9, 30.5e9)}
_SMALLEST_TRAINED = "qwen3-0.6b"
_QUESTIONS = 15  # questions of one user
_START = 25.0  # seconds until a command is ready to measure, compiling included
_REACHED = 0.5  # assumed share of the peak, for time estimates
_ATTENTION = 1.4  # all FLOPs over matrix FLOPs
_BYTES_OF = {"score": 3, "lora": 5, "full": 24}  # bytes per weight, with room for activations
_TIMES_OF_RIVAL = {"transformers": 4.0, "transformers-cached": 3.0, "trl": 6.0, "vllm": 2.0}
_NEEDED = {
    "transformers": ("torch", "transformers"),
    "transformers-cached": ("torch", "transformers"),
    "trl": ("torch", "transformers", "trl"),
    "vllm": ("vllm",),
}
"""Packages that each rival requires."""


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One command of `prb bench`."""

    id: str
    verb: str
    model: str
    # flags of the command, and their values; True for a flag without a value
    flags: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = _START  # estimated duration
    needs: str | None = None  # id of the row that must have confirmed float32 scores
    # kind of model folder to make of the shape; None if random weights suffice
    weights: Literal["reward", "policy"] | None = None
    rival: Rival | None = None  # library to compare with; `absent` is the reason for no comparison
    absent: str | None = None
    only_beside: bool = False  # the row is meaningless without the rival
    environment: Mapping[str, str] = field(default_factory=dict)

    def words(self, model: str, *, rival: bool = True) -> list[str]:
        """Return the words of the command after `prb bench`, with or without its comparison."""
        words = [self.verb, model]
        for flag, value in self.flags.items():
            values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            words += [f"--{flag}", *([] if value is True else map(str, values))]
        return [*words, *(["--against", self.rival] if rival and self.rival else [])]

    def command(self, words: Sequence[str]) -> str:
        """Return a command line for a shell."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, "prb", "bench", *map(shlex.quote, words)])


def missing_rivals(machine: Machine) -> dict[str, str]:
    """Return the rivals that cannot run on a machine, each with the reason."""
    missing = {}
    for rival, packages in _NEEDED.items():
        absent = [name for name in packages if machine.versions.get(name) is None]
        if absent:
            missing[rival] = f"{' and '.join(absent)} not installed"
        elif machine.platform not in ("cpu", "gpu"):
            missing[rival] = f"torch does not support {machine.platform} here"
        elif machine.torch_device not in (None, "cuda") and machine.platform == "gpu":
            missing[rival] = "the installed torch sees no GPU"
    return missing


def plan_rows(
    machine: Machine,
    *,
    missing: Mapping[str, str],
    model: str | None = None,
    prefix_tokens: int = 2000,
    response_tokens: int = 130,
) -> list[BenchRow]:
    """Return the rows for a machine, most important first; a row comes after the row that it needs.

    ``missing`` are rivals that cannot run; ``model`` replaces the shapes that the memory allows.
    """
    on_cpu = machine.platform == "cpu"
    plan = _Plan(machine, missing, model, prefix_tokens, response_tokens)
    if on_cpu:
        scored = trained = tuned = acted = plan.shape("qwen3-40m")
        pairs = {2: 24, 16: 8, 64: 2}
    else:
        scored, tuned = plan.largest("score"), plan.largest("lora")
        # TRL's weights and moments are in memory beside ours.
        trained, acted = plan.largest("full"), plan.shape(_SMALLEST_TRAINED)
        pairs = {count: size * machine.count for count, size in {2: 32, 16: 8, 64: 4}.items()}
    plan.parity("auto")
    for count, size in pairs.items():
        plan.score(f"score-k{count}", scored, count, size, rival="transformers-cached")
    if on_cpu and model is None:
        plan.score("score-k16-recurrent", "qwen3.5-40m", 16, 2, rival="transformers")
    plan.score("score-users", scored, 2, 2 * _QUESTIONS, users=True, rival="transformers-cached")
    plan.parity("auto", training=True)
    steps = 4 if on_cpu else 8 * machine.count
    plan.train("train-full", trained, "full", steps, rival="trl")
    plan.train("train-lora", tuned, "lora", steps)
    plan.train("train-head", tuned, "head", steps)
    for samples in (16, 1):
        plan.sample(f"sample-{samples}", scored, samples)
    plan.train("train-users", trained, "full", 10, users=10, rival="trl")
    plan.serve("serve", acted)
    plan.ppo("ppo", acted)
    if machine.platform == "gpu":
        plan.score("score-k2-vllm", scored, 2, pairs[2], rival="vllm", only_beside=True)
    if not on_cpu:
        plan.parity("xla")
        for count in (2, 16):
            plan.score(f"score-k{count}-xla", scored, count, pairs[count], attention="xla")
        plan.parity("xla", training=True)
        plan.train("train-full-xla", trained, "full", steps, attention="xla")
        for remat in REMAT_POLICIES[1:]:  # beside the choice by memory
            plan.train(f"train-full-{remat}", trained, "full", steps, remat=remat)
    if model is None:
        size = 2 if on_cpu else 4 * pairs[2]
        plan.score("score-k2-0.6b", "qwen3-0.6b", 2, size, rival="transformers-cached")
        plan.parity("auto", mixture=True)
        plan.score("score-k2-moe", plan.mixture("score"), 2, pairs[2], mixture=True)
        plan.parity("auto", training=True, mixture=True)
        plan.train("train-lora-moe", plan.mixture("lora"), "lora", steps, mixture=True)
    # the dtype that the rows above do not have
    plan.parity("auto", dtype="bfloat16" if on_cpu else "float32")
    if on_cpu:
        plan.score("score-k16-bfloat16", scored, 16, pairs[16], dtype="bfloat16", rival="transformers-cached")
    return plan.rows


class _Plan:
    """The rows so far, and their common settings."""

    def __init__(
        self, machine: Machine, missing: Mapping[str, str], model: str | None, prefix: int, response: int
    ) -> None:
        self.machine, self.missing, self.model = machine, missing, model
        self.prefix, self.response = prefix, response
        self.on_cpu = machine.platform == "cpu"
        self.dtype, self.rounds = ("float32", 1) if self.on_cpu else ("bfloat16", 3)
        self.lengths = {"prefix-tokens": prefix, "response-tokens": response}
        self.scores_agree = f"parity-{self.dtype}-auto"
        self.rows: list[BenchRow] = []

    def shape(self, name: str) -> str:
        """Return the requested model, else this shape."""
        return self.model or name

    def largest(self, use: str) -> str:
        """Return the largest shape that fits on all devices together for a use."""
        memory = self.machine.memory_bytes * self.machine.count
        fitting = [name for name, size in _WEIGHTS.items() if size * _BYTES_OF[use] <= memory]
        return self.shape(fitting[-1] if fitting else "qwen3-40m")

    def mixture(self, use: str) -> str:
        """Return the largest mixture of experts that fits on all devices together for a use."""
        memory = self.machine.memory_bytes * self.machine.count
        fitting = [name for name, (_, size) in _MIXTURES.items() if size * _BYTES_OF[use] <= memory]
        return next(iter(_MIXTURES)) if self.on_cpu or not fitting else fitting[-1]

    def parity(
        self, attention: str, *, training: bool = False, mixture: bool = False, dtype: str | None = None
    ) -> None:
        """Add a check of scores, or with ``training`` also of a loss."""
        kind = dtype or self.dtype
        flags = {"dtype": kind, "attention": attention, **({"training": True} if training else {})}
        name = f"{'train-parity' if training else 'parity'}{'-moe' if mixture else ''}-{kind}-{attention}"
        # A CPU computes the reference: use a small model, with the head size of the larger ones.
        model = self.shape("qwen3-110m-a40m" if mixture else "qwen3-40m")
        self._add(name, "parity", model, flags, rival="transformers", weights="reward", work=0)

    def score(
        self,
        name: str,
        model: str,
        responses: int,
        pairs: int,
        *,
        attention: str = "auto",
        users: bool = False,
        mixture: bool = False,
        dtype: str | None = None,
        **more: Any,
    ) -> None:
        """Add a row that scores comparisons."""
        kind = dtype or self.dtype
        questions = {"questions-per-user": _QUESTIONS} if users else {}
        flags = {"dtype": kind, "responses": responses, "pairs": pairs, **questions, **self.lengths}
        flags |= ({} if attention == "auto" else {"attention": attention}) | {"rounds": self.rounds}
        people = pairs // _QUESTIONS if users else pairs
        work = people * self.prefix + pairs * responses * self.response
        needs = f"parity{'-moe' if mixture else ''}-{kind}-{attention}"
        self._add(name, "score", model, flags, work=work, needs=needs, **more)

    def train(
        self,
        name: str,
        model: str,
        tuning: str,
        pairs: int,
        *,
        attention: str = "auto",
        users: int = 1,
        mixture: bool = False,
        remat: str | None = None,
        **more: Any,
    ) -> None:
        """Add a row that runs training steps."""
        questions = {"questions-per-user": users} if users > 1 else {}
        flags = {"dtype": self.dtype, "tuning": tuning, "pairs": pairs, **questions, **self.lengths}
        flags |= {} if attention == "auto" else {"attention": attention}
        flags |= ({} if remat is None else {"remat": remat}) | {"rounds": self.rounds}
        work = 3 * (pairs // users * self.prefix + 2 * pairs * self.response)
        needs = f"train-parity{'-moe' if mixture else ''}-{self.dtype}-{attention}"
        self._add(name, "train", model, flags, work=work, untimed=2, needs=needs, **more)

    def sample(self, name: str, model: str, samples: int) -> None:
        """Add a row that draws texts of a policy."""
        prompts, new = 4, 128
        flags = {"dtype": self.dtype, "prompts": prompts, "samples": samples, "prompt-tokens": self.prefix}
        flags |= {"new-tokens": min(new, 4 * self.response), "rounds": self.rounds}
        # Drawing a token costs more than its FLOPs.
        work = prompts * (self.prefix + 4 * samples * new)
        self._add(name, "sample", model, flags, rival="transformers", work=work, needs=self.scores_agree)

    def serve(self, name: str, model: str) -> None:
        """Add a row that loads the server with clients."""
        clients, seconds = (8, 15) if self.on_cpu else (256, 30)
        prefix = min(self.prefix, 500) if self.on_cpu else self.prefix
        flags = {"dtype": self.dtype, "clients": clients, "seconds": seconds}
        flags |= self.lengths | {"prefix-tokens": prefix}
        work = 3 * clients * (prefix + 2 * self.response)
        self._add(name, "serve", model, flags, work=work, weights="reward", needs=self.scores_agree)

    def ppo(self, name: str, model: str) -> None:
        """Add a row that trains a policy."""
        prompts, samples, new = 2, 8, min(128, 4 * self.response)
        flags = {"dtype": self.dtype, "prompts": prompts, "samples": samples, "prompt-tokens": self.prefix}
        flags |= {"new-tokens": new, "rounds": self.rounds}
        work = 6 * prompts * samples * (self.prefix // 4 + 4 * new)
        needs = self.scores_agree
        self._add(name, "ppo", model, flags, rival="trl", work=work, weights="policy", needs=needs)

    def _add(
        self,
        name: str,
        verb: str,
        model: str,
        flags: Mapping[str, Any],
        *,
        work: float,
        untimed: int = 1,
        rival: Rival | None = None,
        only_beside: bool = False,
        **more: Any,
    ) -> None:
        """Add a row; `work` is the number of tokens of a pass, and `untimed` passes precede the timed ones."""
        absent = None if rival is None else self.missing.get(rival)
        beside = None if absent and not only_beside else rival
        passes = untimed + self.rounds * (1 + (_TIMES_OF_RIVAL[beside] if beside else 0))
        weights = _MIXTURES[model][0] if model in _MIXTURES else _WEIGHTS.get(model, 0.0)
        flops = 2 * weights * work * _ATTENTION * passes
        peaks = self.machine.peak_gflops
        peak = peaks.get(flags["dtype"], peaks[self.dtype]) * 1e9 * self.machine.count
        shares_gpu = self.machine.platform == "gpu" and beside
        row = BenchRow(
            id=name,
            verb=verb,
            model=model,
            flags=flags,
            seconds=_START * (2 if beside else 1) + flops / (_REACHED * peak),
            rival=beside,
            absent=f"{rival}: {absent}" if absent else None,
            only_beside=only_beside,
            environment={"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"} if shares_gpu else {},
            **more,
        )
        self.rows.append(row)
