"""From thirteen reward models of differing quality to a correlation: the study of docs/behaviour.md, in one folder.

    python docs/behaviour_chain.py POLICY OUT

POLICY is a small causal language model, which first learns to write answers like those of the generated personas. Each
reward model then changes what it writes in three ways, by choice among 16 samples, by guidance and by GRPO, and the
truth says how much the texts please the persons who asked. Every command is printed as it would be typed. The same call
continues what was killed.
"""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from prb_jax.cli import main
from prb_jax.data.comparison import Comparison
from prb_jax.metrics.prediction import Cells, draw_weights, pooled
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.quickstart import recipe
from prb_jax.quickstart.recipe import make_start
from prb_jax.runs.behaviour import Figure, pool, read_behaviour, reward_identity
from prb_jax.sources import personas

TRUTH = "baseline:persona-truth"
RECIPE = recipe.Recipe(profiles=2, generic_repeats=1)
TEMPLATE = (  # an answer ends with the token that ends a text, so that the policy learns to end
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
TOKENS = 64
SHOWN = "--profile-posts 1 --max-new-tokens 64"
SEEDS = (0, 1)

SMALL = (
    "tuning=full batch.comparisons=64 optimizer.weight_decay=0.1 optimizer.b2=0.98 optimizer.final_share=0.05 "
    "loss.label_smoothing=0.1 loss.user_weights=false"
)
BLIND = f"configs/bt_user_blind.py {SMALL} optimizer.learning_rate=5e-3"
PROFILE = f"configs/bt_profile_context.py {SMALL} optimizer.learning_rate=1e-2"
LESS = "limit=9600"  # what so few steps do not see is not read
OWN = "tuning=full batch.comparisons=16 optimizer.learning_rate=1e-3 init_head=true"
TRAINED = {  # name: what it starts from, how many of ten labels are exchanged in its data, config and settings
    "blind": ("start", 0, f"{BLIND} steps=100"),
    "profile_30": ("start", 0, f"{PROFILE} {LESS} steps=30"),
    "profile_100": ("start", 0, f"{PROFILE} {LESS} steps=100"),
    "profile_400": ("start", 0, f"{PROFILE} steps=400"),
    "two_posts": ("start", 0, f"{PROFILE} {LESS} steps=150 profile_posts=2"),
    "noisy_2": ("start", 2, f"{PROFILE} {LESS} steps=150"),
    "noisy_4": ("start", 4, f"{PROFILE} {LESS} steps=150"),
    "opposite": ("start", 10, f"{PROFILE} {LESS} steps=60"),
    "policy_blind": ("policy/model", 0, f"configs/bt_user_blind.py {OWN} limit=400 steps=25"),
    "policy_profile": (
        "policy/model",
        0,
        f"configs/bt_profile_context.py {OWN} limit=400 profile_posts=2 steps=25",
    ),
}
METHOD = "offset"
SHOTS, BACKBONE = 16, "profile_400"
BASELINES = ("baseline:length", "baseline:profile-overlap")
BY_GRPO = ("blind", "profile_100", "profile_400", "noisy_4", "opposite", "sixteen_shots", *BASELINES, TRUTH)
GRPO = (
    "configs/rl/profile_in_prompt.py algorithm=grpo tuning=full profile_posts=1 kl.place=loss kl.estimator=k3 "
    f"kl.coefficient=0.05 rollout.n=8 rollout.temperature=1 rollout.max_new_tokens={TOKENS} batch.prompts=8 "
    "batch.minibatch=8 batch.epochs=1 optimizer.learning_rate=1e-4 steps=16 scoring.empty=0 checkpoint.every=16 "
    "log.tensorboard=false"
)


def run(command: str) -> None:
    """Run one command of `prb`, or end."""
    print(f"\n$ prb {command}", flush=True)
    status = main([*shlex.split(command), *([] if command.startswith("correlate") else ["--no-progress"])])
    if status:
        sys.exit(status)


def by_turns(rows: Iterable[Comparison]) -> list[Comparison]:
    """The comparisons in such an order that the first ones are of all users."""
    seen: dict[str | None, int] = {}
    turns = []
    for one in rows:
        turns.append((seen.get(one.user_id, 0), one))
        seen[one.user_id] = turns[-1][0] + 1
    return [one for _, one in sorted(turns, key=lambda turn: turn[0])]


def write(path: Path, rows: Iterable[Comparison]) -> None:
    """Write comparisons as JSON lines, without what is private."""
    lines = []
    for one in rows:
        row = one.to_row()
        lines.append(json.dumps({key: row[key] for key in row if key not in ("rubric_aspects", "narrative")}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def most(rows: Sequence[Comparison], each: int) -> list[Comparison]:
    """At most so many comparisons of each user, the first ones."""
    counts: dict[str | None, int] = {}
    found = []
    for one in rows:
        counts[one.user_id] = counts.get(one.user_id, 0) + 1
        if counts[one.user_id] <= each:
            found.append(one)
    return found


def exchanged(rows: Sequence[Comparison], of_ten: int) -> list[Comparison]:
    """The comparisons with chosen and rejected exchanged in so many of ten."""
    found = []
    for number, one in enumerate(rows):
        chosen, rejected = one.responses if number % 10 >= of_ten else one.responses[::-1]
        found.append(
            Comparison(
                id=one.id, question=one.question, chosen=chosen, rejected=rejected, profile=one.profile,
                user_id=one.user_id, category=one.category, subset=one.subset,
            )
        )  # fmt: skip
    return found


def prepare(out: Path) -> None:
    """Write the data and the small model that most reward models start from."""
    if (out / "prepared").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    personal = [*personas.load("train"), *personas.load("train-more-wording")]
    generic = personas.load("generic-train")
    make_start(out / "start", [*personal, *generic], RECIPE)
    pairs = recipe.training_pairs(personal, generic, RECIPE)
    for of_ten in {share for _, share, _ in TRAINED.values()}:
        write(out / f"train_{of_ten}.jsonl", exchanged(pairs, of_ten))
    seen, unseen = personas.load("test-seen"), personas.load("test-unseen")
    test = by_turns([*seen[::3], *unseen[::3]])
    write(out / "test.jsonl", test)
    held = {one.id for one in test}
    write(out / "history.jsonl", most([one for one in (*seen, *unseen) if one.id not in held], SHOTS))
    of_unseen = [one for one in test if one.subset == "personal-unseen"]
    of_seen = [one for one in test if one.subset == "personal-seen"]
    write(out / "prompts.jsonl", by_turns([*most(of_seen, 1), *most(of_unseen, 4)]))
    write(out / "persons.jsonl", personas.load("train")[::4])
    (out / "chat.jinja").write_text(TEMPLATE, encoding="utf-8")
    (out / "prepared").touch()


def train_reward_models(out: Path) -> None:
    """Train what starts from the small model and from the policy, and fit a method to a few choices of each person."""
    for name, (start, of_ten, settings) in TRAINED.items():
        run(
            f"train {settings} model={out / start} data={out}/train_{of_ten}.jsonl validation.fraction=0 "
            f"log.tensorboard=false log.plot=false --out {out}/models/{name}"
        )
    run(f"features {out}/models/{BACKBONE} --data {out}/persons.jsonl --out {out}/features")
    run(
        f"personalise --data {out}/persons.jsonl --backbone {out}/features --methods {METHOD} --shots 0,{SHOTS} "
        "--split other-question "
        f"--seeds 1 --out {out}/study"
    )


def names_of_models(out: Path) -> dict[str, str]:
    """Each model as a command takes it, by name; the truth is the last one."""
    found = {name: f"{out}/models/{name}" for name in TRAINED}
    found["sixteen_shots"] = f"{out}/study/fitted/{METHOD}"
    return found | {name: name for name in (*BASELINES, TRUTH)}


def folder_of(name: str) -> str:
    """A name as part of a path."""
    return name.removeprefix("baseline:")


def cell(figures: Sequence[Figure], *, seeds: bool = False, form: str = "+.3f") -> str:
    """A figure, its 95 % interval over users, and its value for each seed."""
    if not figures:
        return "-"
    one = pool(figures)
    columns = (np.asarray(column, np.float64)[:, None] for column in (one.sums, one.counts))
    weights = draw_weights(len(one.clusters), draws=2000, seed=0)
    (ends,) = pooled(Cells(*columns), weights).intervals()
    each = ", ".join(f"{figure.value:{form}}" for figure in figures)
    return f"{one.value:{form}} {ends_of(ends, form)}" + (f"; {each}" if seeds else "")


def ends_of(ends: Sequence[float] | None, form: str) -> str:
    """An interval in brackets."""
    return "" if ends is None else f"[{ends[0]:{form}}, {ends[1]:{form}}]"


def own_gain(out: Path, name: str, model: str) -> str:
    """How much GRPO raised its own reward: texts of the trained policies less samples of the one they started from."""
    rows = (json.loads(line) for line in (out / "best" / "rewards.jsonl").read_text().splitlines())
    before = {row["id"]: float(np.mean(row["scores"])) for row in rows if row["scorer"] == model}
    gains, users = [], []
    for seed in SEEDS if name in BY_GRPO else ():
        path = out / "grpo" / f"{folder_of(name)}_{seed}" / "held_out.jsonl"
        for row in map(json.loads, path.read_text().splitlines()):
            gains.append(row["reward"] - before[row["id"]])
            users.append(row["user_id"])
    if not gains:
        return "-"
    return (
        f"{np.mean(gains):+.3f} {ends_of(mean_interval(np.asarray(gains), users).to_json()['ci95'], '+.3f')}"
    )


def write_table(out: Path, models: dict[str, str]) -> None:
    """Write all figures of every model as a table of Markdown, and the correlations as another one."""
    runs = [out / "best", out / "policy_accuracy"]
    runs += [out / "guided" / folder_of(name) for name in models]
    runs += [out / "grpo" / f"{folder_of(name)}_{seed}" for name in BY_GRPO for seed in SEEDS]
    figures = [each for folder in runs for each in read_behaviour(folder)]
    curves = json.loads((out / "best" / "summary.json").read_text())["curves"]
    lines = []
    for name, point in (("any sample", curves["random"][0]), ("the best of 16", curves["oracle"][-1])):
        lines.append(
            f"- the policy as it starts, {name}: {point['quality']:+.3f} {ends_of(point['ci95'], '+.3f')}"
        )
    heads = ("reward model", "accuracy, seen", "unseen", "policy accuracy", "best of 16", "guided")
    heads = (*heads, "GRPO, seen", "GRPO, unseen", "own reward by GRPO")
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, model in models.items():
        folder = out / "scores" / folder_of(name)
        identity = reward_identity(json.loads((folder / "run.json").read_text())["inputs"]["model"])
        subsets = json.loads((folder / "summary.json").read_text())["accuracy_by_subset"]
        own = [one for one in figures if one.reward_model == identity]
        cells = [f"`{name}`", *(f"{subsets[f'personal-{who}']:.3f}" for who in ("seen", "unseen"))]
        cells.append(cell([one for one in own if one.name == "policy accuracy (seq_score)"], form=".3f"))
        for figure in ("best-of-16", "guided quality"):
            cells.append(cell([one for one in own if one.name == figure]))
        for who in ("seen", "unseen"):
            cells.append(cell([one for one in own if one.name == f"grpo gold, personal-{who}"], seeds=True))
        cells.append(own_gain(out, name, model))
        lines.append(f"| {' | '.join(cells)} |")
    heads = ("behaviour", "models", "Pearson", "Spearman", "p", "Kendall", "p")
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in json.loads((out / "correlation" / "correlate.json").read_text())["correlations"]:
        measures = {
            name: f"{one['value']:+.2f} {ends_of(one['ci95'], '+.2f')} | "
            + ("< 0.001" if one["p"] < 1e-3 else f"{one['p']:.3f}")
            for name, one in each["measures"].items()
        }
        pearson = measures["pearson"].partition(" |")[0]
        cells = [each["behaviour"], str(each["models"]), pearson]
        lines.append(f"| {' | '.join([*cells, measures['spearman'], measures['kendall']])} |")
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written: {out / 'table.md'}")


def chain(policy: str, out: Path) -> None:
    """Run all commands."""
    prepare(out)
    run(
        f"ppo configs/rl/sft.py model={policy} data=personas:train chat_template={out}/chat.jinja profile_posts=1 "
        f"steps=500 optimizer.learning_rate=3e-3 checkpoint.every=100 --out {out}/policy"
    )
    train_reward_models(out)
    models, started = names_of_models(out), f"{out}/policy"
    history = f"--history {out}/history.jsonl"
    own = {name: history if name == "sixteen_shots" else "" for name in models}
    for name, model in models.items():
        run(f"evaluate {model} --data {out}/test.jsonl {own[name]} --out {out}/scores/{folder_of(name)}")
    every = " ".join(models.values())
    prompts = f"--data {out}/prompts.jsonl"
    run(f"sample {started} {prompts} {SHOWN} --n 16 --out {out}/samples")
    run(f"best-of-n --samples {out}/samples --rewards {every} {history} --quality {TRUTH} --out {out}/best")
    run(
        f"policy-accuracy {started} --rewards {every} {history} --data {out}/test.jsonl --limit 100 --candidates 0 "
        f"--score seq_score --profile-posts 1 --out {out}/policy_accuracy"
    )
    for name, model in models.items():
        run(
            f"guide {started} --reward {model} {own[name]} {prompts} {SHOWN} --limit 50 --chunk 16 --candidates 4 "
            f"--temperature 1 --weight 1000 --quality {TRUTH} --out {out}/guided/{folder_of(name)}"
        )
    for seed in SEEDS:
        for name in BY_GRPO:
            learned = f"scoring.history={out}/history.jsonl" if name == "sixteen_shots" else ""
            run(
                f"ppo {GRPO} model={started}/model data={out}/persons.jsonl reward={models[name]} {learned} "
                f"watch.gold={TRUTH} watch.data={out}/prompts.jsonl seed={seed} "
                f"--out {out}/grpo/{folder_of(name)}_{seed}"
            )
    scores = " ".join(f"{out}/scores/{folder_of(name)}" for name in models if name != TRUTH)
    guided = " ".join(f"{out}/guided/{folder_of(name)}" for name in models)
    grpo = " ".join(f"{out}/grpo/{folder_of(name)}_{seed}" for name in BY_GRPO for seed in SEEDS)
    run(
        f"correlate --scores {scores} --behaviour {out}/best {out}/policy_accuracy {guided} {grpo} "
        f"--figures accuracy --out {out}/correlation"
    )
    write_table(out, models)


if __name__ == "__main__":
    chain(sys.argv[1], Path(sys.argv[2]))
