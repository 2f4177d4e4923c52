"""A fixed set of small runs, to show that a change of the code leaves their bytes as they are.

    python -m tests.same_runs run OUT [NAME ...]     # in the checkout before the change, and in the one after it
    python -m tests.same_runs compare OUT OTHER      # names the rows and fields that differ; status 1 if any does

The first run makes models and data in OUT/../inputs, and all runs beside it share them, so that both checkouts read the
same files: use `OUT = FOLDER/before` and `FOLDER/after`. Everything goes through the command line, in one process.
On one machine, with one version of jax, float32 runs are equal to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEPT = (".jsonl", ".json", ".csv")
LEFT_OUT = ("run.json", "train.json", "prb_view.json", "config.json", "generation_config.json", "store.json")
"""Files that say how a run came about: versions, arguments and paths, but no result."""
CLOCK = re.compile(
    r"second|time|per_s$|^mfu|utilisation|memory|bytes|sessions|^versions?$|command", re.IGNORECASE
)
"""Names of fields that the clock or the machine decides."""

TRAINING = {
    "model": "{model}", "data": "{pairs}", "steps": 4, "batch.comparisons": 8, "validation.fraction": 0.25,
    "validation.every": 2, "checkpoint.every": 2, "log.tensorboard": False, "log.plot": False,
}  # fmt: skip
POLICY = {
    "model": "{policy}", "data": "{tastes}", "reward": "{letter}:score", "steps": 2, "tuning": "full",
    "rollout.n": 4, "rollout.max_new_tokens": 6, "batch.prompts": 8, "scoring.empty": 0.0,
    "log.tensorboard": False, "log.plot": False, "checkpoint.every": 1, "optimizer.learning_rate": 0.01,
}  # fmt: skip
OFFLINE = {
    name: value for name, value in POLICY.items() if not name.startswith(("rollout", "scoring", "reward"))
}

RUNS: dict[str, tuple[str | dict[str, Any], ...]] = {
    "evaluate": ("evaluate {model} --data {pairs} --controls all",),
    "evaluate_many": ("evaluate {model} --data {many} --protocol paper --max-length 200",),
    "evaluate_posts": ("evaluate {model} --data {pairs} --profile-posts 0 2",),
    "evaluate_int8": ("evaluate {model} --data {pairs} --quantize int8",),
    "evaluate_personas": ("evaluate baseline:profile-overlap --data personas:test --limit 400",),
    "prepare": ("prepare --data {pairs}",),
    "prepare_tokens": ("prepare --data {pairs} --model {model}",),
    "evaluate_prepared": ("evaluate {model} --data {out}/prepare_tokens",),
    "train_head": ("train {config}", TRAINING | {"tuning": "head"}),
    "train_full": ("train {config}", TRAINING | {"tuning": "full", "profile_posts": 2}),
    "train_lora": ("train {config}", TRAINING | {"tuning": "lora"}),
    "train_users": (
        "train {config}",
        TRAINING | {"tuning": "full", "method": "persona_embedding", "validation.by": "id"},
    ),
    "evaluate_trained": ("evaluate {out}/train_users --data {pairs}",),
    "features": ("features {model} --data {pairs}",),
    "personalise": (
        "personalise --data {pairs} --backbone {out}/features --shots 0,1,2 --seeds 1"
        " --methods pooled,offset,individual,attention",
    ),
    "personalise_networks": (
        "personalise --data {pairs} --backbone {out}/features --shots 0,2 --seeds 1"
        " --methods vpl,gpo,pal,user_embedding,user_clusters --set vpl.steps=20 gpo.steps=20 pal.steps=10,20"
        " user_embedding.steps=10,20 user_clusters.steps=10,20",
    ),
    "rank_profiles": ("rank-profiles --encoder bm25 --data {pairs}",),
    "sample": ("sample {policy} --data {tastes} --n 3 --temperature 0.8 --max-new-tokens 8",),
    "best_of_n": ("best-of-n --samples {out}/sample --rewards {model} baseline:length",),
    "guide": ("guide {policy} --reward {model} --data {tastes} --weight 1 --max-new-tokens 4",),
    "policy_accuracy": ("policy-accuracy {policy} --rewards {model} --data {tastes}",),
    "ppo": ("ppo {config}", POLICY | {"algorithm": "ppo", "batch.minibatch": 4, "batch.epochs": 2}),
    "grpo": ("ppo {config}", POLICY | {"algorithm": "grpo", "kl.place": "loss", "kl.estimator": "k3"}),
    "dpo": ("ppo {config}", OFFLINE | {"algorithm": "dpo"}),
    "sft": ("ppo {config}", OFFLINE | {"algorithm": "sft"}),
}
"""Name of a run -> its command line, and the settings of its config."""


def write_inputs(folder: Path) -> None:
    """Write the models and the data of all runs."""
    from tests.behaviour.rl import tiny as policies
    from tests.training import tiny

    folder.mkdir(parents=True)
    tiny.write_model(folder / "model")
    policies.write_tiny_policy(folder / "policy")
    pairs = tiny.write_rows(folder / "pairs.jsonl", tiny.rows(40, users=8))
    policies.write_rows(folder / "tastes.jsonl")
    many = [json.loads(line) for line in pairs.read_text().splitlines()]
    for number, row in enumerate(many):
        chosen, rejected = row.pop("chosen"), row.pop("rejected")
        row["responses"] = [chosen, *(f"{rejected} {word}" for word in tiny.WORDS[: 1 + number % 5])]
        row["labels"] = [len(row["responses"]) - k for k in range(len(row["responses"]))]
    tiny.write_rows(folder / "many.jsonl", many)
    (folder / "letter.py").write_text(
        "def score(one):\n    return [float('e' in t) for t in one.responses]\n"
    )


def run(out: Path, names: list[str]) -> int:
    """Make the runs in `out`; returns the highest exit status."""
    from prb_jax.cli import main

    inputs = out.parent / "inputs"
    if not inputs.exists():
        write_inputs(inputs)
    places = {
        "model": inputs / "model", "policy": inputs / "policy", "pairs": inputs / "pairs.jsonl",
        "many": inputs / "many.jsonl", "tastes": inputs / "tastes.jsonl", "letter": inputs / "letter.py", "out": out,
    }  # fmt: skip
    worst = 0
    for name in names or RUNS:
        line, *settings = RUNS[name]
        shutil.rmtree(out / name, ignore_errors=True)
        config = out / f"{name}.py"
        out.mkdir(parents=True, exist_ok=True)
        for values in settings:
            filled = {
                key: value.format(**places) if isinstance(value, str) else value
                for key, value in dict(values).items()
            }
            config.write_text(
                "from ml_collections import ConfigDict\n\n\n"
                f"def get_config():\n    return ConfigDict({filled!r}, allow_dotted_keys=True)\n"
            )
        place = out / name / "ranked.jsonl" if name == "rank_profiles" else out / name
        place.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        try:
            status = main([*str(line).format(config=config, **places).split(), "--out", str(place)])
        except SystemExit as error:
            status = int(error.code or 0)
        print(
            f"same_runs: {name}: status {status}, {time.monotonic() - started:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        worst = max(worst, status)
    return worst


def results(out: Path) -> dict[str, list[Any]]:
    """Path of each file of results -> its rows, without what the clock decides."""
    rows_of_files = {}
    for path in sorted(out.rglob("*")):
        if path.suffix not in KEPT or path.name in LEFT_OUT or "checkpoints" in path.parts:
            continue
        text = path.read_text().replace(str(out), "OUT")
        rows = (
            [text]
            if path.suffix == ".csv"
            else [json.loads(line) for line in text.splitlines()]
            if path.suffix == ".jsonl"
            else [json.loads(text)]
        )
        rows_of_files[str(path.relative_to(out))] = [without_clock(row) for row in rows]
    return rows_of_files


def without_clock(value: Any) -> Any:
    """Leave out the fields whose name tells that the clock or the machine decides them."""
    if isinstance(value, dict):
        return {name: without_clock(inner) for name, inner in value.items() if not CLOCK.search(name)}
    return [without_clock(inner) for inner in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Name each place in which two values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            if name not in before or name not in after:
                yield f"{where}.{name}: only {'after' if name in after else 'before'}"
            else:
                yield from differences(before[name], after[name], f"{where}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif before != after:
        yield f"{where}: {str(before)[:80]!r} -> {str(after)[:80]!r}"


def compare(before: Path, after: Path) -> int:
    """Print what differs; returns 1 if anything does."""
    first, second = results(before), results(after)
    names = {path.split(os.sep)[0] for path in second}
    first = {path: rows for path, rows in first.items() if path.split(os.sep)[0] in names}
    lines = list(differences(first, second))
    print("\n".join(lines[:60]) or f"{len(second)} files of {len(names)} runs are equal")
    if len(lines) > 60:
        print(f"... and {len(lines) - 60} more")
    return int(bool(lines))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = arguments.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("run")
    make.add_argument("out", type=Path)
    make.add_argument("names", nargs="*", choices=[*RUNS, []], metavar="NAME")
    two = verbs.add_parser("compare")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    options = arguments.parse_args()
    if options.verb == "run":
        sys.exit(run(options.out.resolve(), options.names))
    sys.exit(compare(options.before.resolve(), options.after.resolve()))
