"""A judge as the reward of a run: how the options of the run open it, and which of them it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prb_jax.judges.options import RUBRIC, JudgeOptions, open_named_judge, parse_judge
from prb_jax.judges.scorer import JudgeScorer
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.remote.endpoint import REPLIES
from prb_jax.rl.settings import PpoSettings

_POINTWISE = ("judge.template", "judge.system", "judge.lowest", "judge.highest")


def open_judge_reward(settings: PpoSettings, name: str, *, out: Path | None) -> JudgeScorer:
    """Open the judge of a name as `judge:MODEL` or `rubric:MODEL`.

    Args:
      settings: of the run.
      name: of the judge.
      out: the run folder, where the replies of an endpoint are kept, so that a run that was killed asks nothing twice.

    Raises:
      RunError: a name of no model, a file that cannot be read, or options that do not go together.
      CheckpointError, MeshError: the model cannot be loaded, or be read as a judge.
    """
    scoring, asked, named = settings.scoring, settings.scoring.judge, parse_judge(name)
    given: dict[str, Any] = {"reason": asked.reason}
    if named.protocol != RUBRIC:
        given |= {"template": asked.template, "system": asked.system, "scale": asked.scale}
    if named.url is not None:
        given["top_logprobs"] = asked.top_logprobs
    return open_named_judge(
        name,
        JudgeOptions(**given),
        loading=LoadOptions(mesh=scoring.mesh or settings.mesh, dtype=scoring.dtype),
        cache=(out or Path()) / REPLIES,
        concurrency=asked.concurrency,
    )


def used_by_judge(scorer: JudgeScorer) -> tuple[str, ...]:
    """Return the options of `scoring` that a judge uses."""
    pointwise = () if scorer.identity()["judge"] == RUBRIC else _POINTWISE
    if scorer.endpoint:
        own: tuple[str, ...] = ("judge.top_logprobs", "judge.concurrency")
    else:
        own = ("dtype", "mesh", *(("max_length",) if scorer.has_max_length else ()))
    return ("profile_posts", "judge.reason", *pointwise, *own)
