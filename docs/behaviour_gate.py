"""Can reinforcement learning move anything? The gate of docs/behaviour.md, in one folder.

    python docs/behaviour_gate.py OUT

A small policy is made from nothing: a tokenizer of words, half a million parameters, and supervised training on answers
of generated personas with six posts of the person in the prompt; in every second row two of these posts stand in the
place of the answer, so that what it writes depends on the person a little. Then GRPO with the truth as the reward must
raise the true satisfaction of people whom nothing was trained on. Every command is printed as it would be typed. The
same call continues what was killed.
"""

import dataclasses
import json
import random
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from prb_jax.checkpoints.save import save_params
from prb_jax.cli import main
from prb_jax.data.comparison import Comparison
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.head import LanguageHead
from prb_jax.models.random_params import init_params
from prb_jax.quickstart.recipe import Recipe, config_json, train_word_tokenizer, training_pairs
from prb_jax.sources import personas
from prb_jax.text.tokenizer import load_tokenizer
from prb_jax.text.visible import TextProtocol, visible

TRUTH = "baseline:persona-truth"
POSTS = 6
RECIPE = Recipe(hidden_size=64, intermediate_size=192, layers=2, heads=2, vocab_size=8192, profiles=4)
HELD_OUT = 8  # of the forty persons of the training part: by them rate and steps were chosen
ROWS = 32_000  # of supervised training
QUIET = "log.tensorboard=false log.plot=false"
SFT = (
    f"configs/rl/sft.py profile_posts={POSTS} batch.prompts=16 steps=1990 optimizer.learning_rate=5e-3 "
    f"optimizer.warmup_share=0.03 checkpoint.every=400 {QUIET}"
)
GRPO = (
    f"configs/rl/profile_in_prompt.py reward={TRUTH} algorithm=grpo tuning=full profile_posts={POSTS} kl.place=loss "
    "kl.estimator=k3 kl.coefficient=0.02 rollout.n=8 rollout.temperature=1 rollout.max_new_tokens=80 batch.prompts=32 "
    f"batch.minibatch=32 batch.epochs=1 optimizer.warmup_share=0.05 scoring.empty=0 watch.gold={TRUTH} "
    f"checkpoint.every=50 {QUIET}"
)
LEARN = "steps=150 optimizer.learning_rate=6e-4 watch.every=25"
LOOK = "steps=1 optimizer.learning_rate=0.0 watch.every=1"  # what a policy writes as it is


def run(command: str) -> None:
    """Run one command of `prb`, or end."""
    print(f"\n$ prb {command}", flush=True)
    status = main([*shlex.split(command), "--no-progress"])
    if status:
        sys.exit(status)


def shown_rows(comparisons: Iterable[Comparison]) -> list[dict[str, object]]:
    """The records of comparisons, without what is private."""
    hidden = ("rubric_aspects", "narrative")
    return [{key: x for key, x in one.to_row().items() if key not in hidden} for one in comparisons]


def write(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def some_of_each(comparisons: Iterable[Comparison], most: int) -> list[Comparison]:
    """At most so many comparisons of each person, in an order that is drawn."""
    drawn = list(comparisons)
    random.Random(1).shuffle(drawn)
    counts: dict[str | None, int] = {}
    chosen = []
    for one in drawn:
        counts[one.user_id] = counts.get(one.user_id, 0) + 1
        if counts[one.user_id] <= most:
            chosen.append(one)
    return chosen


def prepare(out: Path) -> None:
    """Write the untrained policy, and the data."""
    if (out / "prepared").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    train, more = personas.load("train"), personas.load("train-more-wording")
    make_policy(out / "untrained", [*train, *more])
    draws = random.Random(0)
    held = set(draws.sample(sorted({one.user_id or "" for one in train}), HELD_OUT))
    pairs = training_pairs([one for one in (*train, *more) if one.user_id not in held], [], RECIPE)
    prompts = [one for one in train if one.user_id not in held]
    draws.shuffle(prompts)
    write(out / "prompts.jsonl", shown_rows(prompts))
    draws, rows = random.Random(0), shown_rows(pairs)
    draws.shuffle(rows)
    rows = rows[:ROWS]
    for row in rows[1::2]:
        posts: Sequence[dict[str, str]] = row["profile"][:POSTS]  # pyright: ignore[reportIndexIssue]
        row["chosen"] = " ".join(post["text"] for post in draws.sample(posts, 2))
    write(out / "answers.jsonl", rows)
    write(out / "held.jsonl", shown_rows(some_of_each((one for one in train if one.user_id in held), 16)))
    unseen = shown_rows(some_of_each(personas.load("test-unseen"), 20))
    write(out / "unseen.jsonl", unseen)
    write(out / "unseen_exchanged.jsonl", exchanged(unseen))
    (out / "prepared").touch()


def exchanged(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The records with posts of the next person in the place of the person's own; the truth is that of the person."""
    of_person: dict[object, list[dict[str, object]]] = {}
    for row in rows:
        of_person.setdefault(row["user_id"], []).append(row)
    people = sorted(of_person, key=str)
    following = {person: of_person[people[(i + 1) % len(people)]] for i, person in enumerate(people)}
    places = {row["id"]: i for of_one in of_person.values() for i, row in enumerate(of_one)}
    found = []
    for row in rows:
        others = following[row["user_id"]]
        found.append(row | {"profile": others[places[row["id"]] % len(others)]["profile"]})
    return found


def make_policy(folder: Path, comparisons: Sequence[Comparison]) -> None:
    """Write a policy with random weights, and a tokenizer of the words of these comparisons."""
    texts: dict[str, None] = {}
    for one in comparisons:
        seen = visible(one, profile_posts=10, protocol=TextProtocol.DEFAULT)
        texts.update((message.content, None) for message in seen.prefix_messages)
        texts.update((response, None) for response in seen.responses)
    train_word_tokenizer(texts, folder, vocab_size=RECIPE.vocab_size)
    tokenizer = load_tokenizer(folder)
    raw = config_json(RECIPE, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_token_id)
    raw |= {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": True}
    config = dataclasses.replace(parse_config(raw, where="gate"), head=LanguageHead(tied=True))
    params = init_params(config, seed=0)
    params.pop("score", None)
    # Tied embeddings of size one would make logits of size eight: a loss of eighteen to begin with.
    params["embed"] = 0.1 * params["embed"]
    save_params(params, config, folder, raw_config=raw)


def satisfaction(run_folder: Path) -> dict[tuple[str, int], tuple[str, float]]:
    """Of each text on people held out: its person, and the person's true satisfaction."""
    lines = (run_folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    return {(row["id"], row["rollout"]): (row["user_id"], row["gold"]) for row in rows}


def told(values: Sequence[float], users: Sequence[str]) -> str:
    """A mean with its 95 % interval over persons."""
    interval = mean_interval(np.asarray(values), users)
    return f"{np.mean(values):+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"


def gate(out: Path) -> None:
    """Make the policy, train it by the truth, and write `table.md`."""
    prepare(out)
    run(f"ppo {SFT} model={out}/untrained data={out}/answers.jsonl --out {out}/start")
    rest = f"data={out}/prompts.jsonl"
    run(f"ppo {GRPO} {LEARN} model={out}/start/model {rest} watch.data={out}/held.jsonl --out {out}/truth")
    lines = ["| people | start | after GRPO by the truth | gain |", "|---|---|---|---|"]
    for people in ("held", "unseen", "unseen_exchanged"):
        found = []
        for name in ("start", "truth"):
            look = out / f"{name}_{people}"
            watched = f"watch.data={out}/{people}.jsonl --out {look}"
            run(f"ppo {GRPO} {LOOK} model={out}/{name}/model {rest} {watched}")
            found.append(satisfaction(look))
        before, after = found
        users = [user for user, _ in before.values()]
        values = [[texts[key][1] for key in before] for texts in found]
        gains = [after[key][1] - before[key][1] for key in before]
        cells = [people, *(told(numbers, users) for numbers in (*values, gains))]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines) + "\n"
    (out / "table.md").write_text(table, encoding="utf-8")
    print(f"\n{table}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    gate(Path(sys.argv[1]))
