"""From ten reward models of differing quality to a correlation: the chain of docs/behaviour.md, in one folder.

    python docs/behaviour_chain.py POLICY OUT

POLICY is a small causal language model; the reward models are trained from it, so that they share its tokenizer. Every
command is printed as it would be typed. The same call continues what was killed.
"""

import json
import shlex
import sys
from pathlib import Path

from prb_jax.cli import main
from prb_jax.data.comparison import Comparison
from prb_jax.sources import personas

TRAIN_EVERY, TEST_EVERY = 6, 12  # comparisons that are left between two that are used
PROMPTS, PAIRS, TOKENS = 24, 60, 32

BLIND, PROFILE = ("bt_user_blind", []), ("bt_profile_context", ["profile_posts=2"])
MODELS = {  # name: the config, the share of exchanged labels in its data, other settings
    "blind_5": (BLIND, 0, ["steps=5"]),
    "blind_40": (BLIND, 0, ["steps=40"]),
    "blind_160": (BLIND, 0, ["steps=160"]),
    "profile_20": (PROFILE, 0, ["steps=20"]),
    "profile_80": (PROFILE, 0, ["steps=80"]),
    "profile_200": (PROFILE, 0, ["steps=200"]),
    "head_80": (BLIND, 0, ["steps=80", "tuning=head"]),
    "lora_80": (BLIND, 0, ["steps=80", "tuning=lora"]),
    "wrong_4": (BLIND, 4, ["steps=80"]),
    "wrong_10": (BLIND, 10, ["steps=80"]),
}


def run(command: str) -> None:
    """Run one command of `prb`, or end."""
    print(f"\n$ prb {command}", flush=True)
    status = main([*shlex.split(command), *([] if command.startswith("correlate") else ["--no-progress"])])
    if status:
        sys.exit(status)


def write(path: Path, parts: list[tuple[str, int]], *, exchanged: int = 0) -> str:
    """Write every so-manieth comparison of some parts of the generated personas; return the path.

    Args:
      path: the file.
      parts: names, and one comparison of so many is taken.
      exchanged: of ten comparisons, how many have chosen and rejected exchanged.
    """
    rows = [one for part, step in parts for one in personas.load(part)[::step]]
    seen: dict[str | None, int] = {}
    turns = []
    for one in rows:
        turns.append(seen.get(one.user_id, 0))
        seen[one.user_id] = turns[-1] + 1
    rows = [
        rows[place] for place in sorted(range(len(rows)), key=turns.__getitem__)
    ]  # --limit takes all users
    lines = [json.dumps(_row(one, number % 10 < exchanged)) for number, one in enumerate(rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _row(one: Comparison, exchanged: bool) -> dict:
    chosen, rejected = one.responses[::-1] if exchanged else one.responses
    posts = [{"id": post.id, "category": post.category, "text": post.text} for post in one.profile]
    return {
        "id": one.id,
        "user_id": one.user_id,
        "subset": one.subset,
        "question": one.prompt[-1].content,
        "chosen": chosen,
        "rejected": rejected,
        "profile": posts,
    }


def chain(policy: str, out: Path) -> None:
    """Run all commands."""
    out.mkdir(parents=True, exist_ok=True)
    train = [("train", TRAIN_EVERY), ("generic-train", 2)]
    data = {share: write(out / f"train_{share}.jsonl", train, exchanged=share) for share in (0, 4, 10)}
    test = write(out / "test.jsonl", [("test-unseen", TEST_EVERY), ("generic-test", TEST_EVERY)])
    for name, ((config, own), share, settings) in MODELS.items():
        given = " ".join([*own, *settings])
        run(
            f"train configs/{config}.py model={policy} init_head=true data={data[share]} validation.fraction=0 {given} "
            f"--out {out / name}"
        )
        run(f"evaluate {out / name} --data {test} --out {out / 'scores' / name}")
    models = " ".join(str(out / name) for name in MODELS)
    shown = f"--data {test} --profile-posts 1"
    run(f"sample {policy} {shown} --limit {PROMPTS} --n 16 --max-new-tokens {TOKENS} --out {out / 'samples'}")
    run(f"best-of-n --samples {out / 'samples'} --rewards {models} --out {out / 'best'}")
    run(
        f"policy-accuracy {policy} --rewards {models} {shown} --limit {PAIRS} --candidates 5 "
        f"--out {out / 'policy_accuracy'}"
    )
    for name in MODELS:
        run(
            f"guide {policy} --reward {out / name} {shown} --limit {PROMPTS} --weight 2 --max-new-tokens {TOKENS} "
            f"--out {out / 'guided' / name}"
        )
    scores = " ".join(str(out / "scores" / name) for name in MODELS)
    guided = " ".join(str(out / "guided" / name) for name in MODELS)
    run(
        f"correlate --scores {scores} --behaviour {out / 'best'} {out / 'policy_accuracy'} {guided} "
        f"--out {out / 'correlation'}"
    )


if __name__ == "__main__":
    chain(sys.argv[1], Path(sys.argv[2]))
