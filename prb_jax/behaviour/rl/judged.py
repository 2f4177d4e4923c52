"""Judges as rewards: language models that rate each rollout."""

from __future__ import annotations

from pathlib import Path

from prb_jax.behaviour.judges.judge import open_named_judge
from prb_jax.behaviour.judges.names import SCORE
from prb_jax.behaviour.judges.options import JudgeOptions, options_of_judge, parse_judge
from prb_jax.behaviour.judges.scorer import JudgeScorer
from prb_jax.behaviour.rl.settings import PpoSettings
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.scoring.remote.endpoint import REPLIES


def kinds_of(judge: JudgeScorer) -> set[str]:
    """Return the kinds of a judge, as named in `Reward.kinds`."""
    kinds = {"judge", "judge elsewhere" if judge.endpoint else "judge here"}
    if judge.identity()["judge"] == "pairs" and judge.has_max_length:
        kinds.add("judge by letters")
    kinds |= {SCORE: {"judge with a scale"}, "pairs": {"judge of pairs"}}.get(
        judge.identity()["judge"], set()
    )
    if "judge of pairs" in kinds and judge.has_max_length:
        kinds.add("judge by letters")
    row = getattr(getattr(judge.protocol, "pairs", judge.protocol), "row", None)
    if row is not None and not row.roles:
        kinds |= {"judge with a system turn", *(() if row.listwise else ("judge with a template",))}
    return kinds | ({"cut judge"} if judge.endpoint is None and judge.has_max_length else set())


def open_judged(settings: PpoSettings, name: str, *, out: Path | None) -> JudgeScorer:
    """Open a judge by name, e.g. `judge:MODEL`; a resumed run repeats no request to an endpoint."""
    scoring, asked, named = settings.scoring, settings.scoring.judge, parse_judge(name)
    names = [
        "reason",
        "reason_tokens",
        "temperature",
        "votes",
        "chat_template_kwargs",
        "template",
        "system",
        "scale",
    ]
    names += ["pairing", "ties", "min_mass", *(["top_logprobs"] if named.url is not None else [])]
    options = JudgeOptions(**{option: getattr(asked, option) for option in names})
    return open_named_judge(
        name,
        options_of_judge(options, name),
        loading=LoadOptions(mesh=scoring.mesh or settings.mesh, dtype=scoring.dtype),
        cache=(out or Path()) / REPLIES,
        concurrency=asked.concurrency,
    )
