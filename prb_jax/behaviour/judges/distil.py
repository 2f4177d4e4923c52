"""`prb distil`: create training data from a policy's samples and the rewards that a model gave them.

The best sample of each prompt becomes `chosen`, and a worse one `rejected`. `configs/rl/sft.py` trains on the best of n
(rejection sampling), `configs/rl/dpo.py` on the best against the worst, and `prb train` trains a reward model on the
order of the rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from prb_jax.behaviour.judges.best_of_n import REWARD_ROWS, REWARDS, RUNS
from prb_jax.behaviour.judges.candidates import read_candidates
from prb_jax.errors import DataError, RunError, quote
from prb_jax.platform.paths import localised
from prb_jax.records.writing import json_line, refuse_file, write_json, write_once
from prb_jax.runs.kind import RUN, as_recorded, command_line
from prb_jax.runs.other_inputs import check_same_inputs

PAIRS: Final = "pairs.jsonl"
RECORD: Final = "distil.json"
Rejected = Literal["worst", "random"]
REJECTED: Final = ("worst", "random")

_DEFINITIONS: Final = {
    "prompts": "prompts of the run with a sample that can be scored",
    "pairs": f"records of {PAIRS}: one a prompt, chosen before rejected",
    "unsampled": "prompts of the data without a sample that can be scored: left out",
    "single": "prompts with one scored sample: left out",
    "too_close": "prompts without a sample whose reward is lower by at least the margin: left out",
    "same_text": "prompts whose two samples are the same text: left out",
    "chosen_reward": "mean reward of the chosen samples; null without a pair",
    "rejected_reward": "mean reward of the rejected samples",
    "mean_reward": "mean over prompts of the mean reward of their samples",
}


@dataclass(frozen=True)
class Distilled:
    """The result of `distil`.

    Attributes:
      path: File of records {prompt, chosen, rejected, margin, ...}.
      summary: Summary of the records, as in `distil.json`.
    """

    path: Path
    summary: dict[str, Any]


def distil(
    run: str | Path,
    *,
    out: str | Path,
    reward: str | None = None,
    rejected: Rejected = "worst",
    margin: float = 0.0,
    seed: int = 0,
    samples: str | Path | None = None,
    data: Sequence[str] | None = None,
) -> Distilled:
    """Write the best sample of each prompt and a worse one, as records that every verb can read.

    A record is the comparison of the data (its id, prompt, user and profile) with two samples as `chosen` and
    `rejected`; `margin` is the difference of their rewards. Ties go to the first sample. Equal inputs give equal bytes.

    Args:
      run: Finished run of `prb best-of-n`.
      out: Folder for `pairs.jsonl` and `distil.json`.
      reward: Name of the reward in the run that ranks the samples; optional if there is only one.
      rejected: "worst", or "random": any sample whose reward is lower by ``margin``.
      margin: Minimum difference of the two rewards, which must differ; other prompts are left out and counted.
      seed: Seed for ``rejected="random"``; a prompt's draw depends only on the seed and the prompt's id.
      samples: Run of `prb sample`, if moved since.
      data: Data of the samples, if renamed since.

    Raises:
      DataError: the run does not have this reward, or an option is invalid.
      RunError: the run is not finished, the samples differ, no pair is left, or the folder has other contents.
    """
    if rejected not in REJECTED:
        raise DataError(f"rejected: expected {' or '.join(REJECTED)}, found {quote(rejected)}")
    if not np.isfinite(margin) or margin < 0:
        raise DataError(f"margin: expected a finite number of at least 0, found {quote(margin)}")
    refuse_file(out)
    folder = Path(run)
    record = RUNS.read_finished(folder)
    names = list(record["inputs"]["rewards"])
    expected = f"reward: expected one of the rewards of {folder}: {', '.join(names)}"
    if reward is None and len(names) != 1:
        raise DataError(expected)
    reward = reward or names[0]
    if reward not in names:
        raise DataError(f"{expected}; found {quote(reward)}")
    if samples is None and "samples" not in record:
        raise RunError(f"{folder / RUN}: expected the field 'samples', found none; give --samples DIR")
    sampled = Path(localised(samples or record["samples"]))
    drawn = read_candidates(sampled, data)
    check_same_inputs(sampled, record["inputs"]["samples"], as_recorded(drawn.run["inputs"]))
    rows = REWARD_ROWS.read(folder)
    counts = {"unsampled": len(drawn.left_out), "single": 0, "too_close": 0, "same_text": 0}
    lines: list[bytes] = []
    rewards: list[tuple[float, float]] = []
    means: list[float] = []
    for prompt in drawn.prompts:
        row = rows.get((reward, prompt.id))
        if row is None or row["samples"] != list(prompt.numbers):
            raise RunError(
                f"{folder / REWARDS}: expected rewards by {reward} of the samples of {quote(prompt.id)}, found none"
            )
        scores = np.array([np.nan if score is None else score for score in row["scores"]], np.float64)
        scored = np.flatnonzero(np.isfinite(scores))
        if len(scored):
            means.append(float(scores[scored].mean()))
        if len(scored) < 2:
            counts["single"] += 1
            continue
        best = int(scored[np.argmax(scores[scored])])
        gaps = scores[best] - scores[scored]
        worse = scored[(gaps > 0) & (gaps >= margin)]
        if not len(worse):
            counts["too_close"] += 1
            continue
        if rejected == "worst":
            other = int(worse[np.argmin(scores[worse])])
        else:
            digest = sha256(f"{seed}\0{prompt.id}".encode()).digest()
            other = int(worse[int.from_bytes(digest) % len(worse)])
        texts = [prompt.comparison.responses[place] for place in (best, other)]
        if texts[0] == texts[1]:
            counts["same_text"] += 1
            continue
        pair = {
            **{name: value for name, value in prompt.comparison.to_row().items() if name != "responses"},
            "chosen": texts[0],
            "rejected": texts[1],
            "margin": float(scores[best] - scores[other]),
            "meta": {"reward": reward, "samples": [prompt.numbers[best], prompt.numbers[other]]},
        }
        lines.append(json_line(pair))
        rewards.append((float(scores[best]), float(scores[other])))
    if not lines:
        raise RunError(
            f"{folder}: no prompt has two samples whose rewards by {reward} differ by the margin {margin:g}"
        )
    chosen_mean, rejected_mean = map(float, np.mean(rewards, axis=0))
    summary = {
        "reward": reward,
        "prompts": len(drawn.prompts),
        "pairs": len(lines),
        **counts,
        "chosen_reward": chosen_mean,
        "rejected_reward": rejected_mean,
        "mean_reward": float(np.mean(means)),
        "definitions": _DEFINITIONS,
    }
    target = Path(out)
    inputs = {
        "run": record["inputs"],
        "reward": reward,
        "rejected": rejected,
        "margin": margin,
        **({"seed": seed} if rejected == "random" else {}),
    }
    path = target / PAIRS
    write_once({path: b"".join(lines)})
    write_json(
        target / RECORD,
        {"kind": "prb_jax distil", "command": command_line(), "inputs": inputs, "summary": summary},
    )
    return Distilled(path, summary)
