"""Does a better reward model make a better policy? The study of docs/behaviour.md, in one folder.

    python docs/behaviour_study.py OUT [--workers 2]

A small policy is made from nothing and taught to write, with six posts of the person in the prompt. Ten reward
models of differing quality, and the truth, then change what it writes: by choice among 16 samples, by guidance, by
supervised training on their best samples, by DPO, by GRPO and by PPO. The truth says how much the texts please the
persons who asked. Every command is printed as it would be typed. So many commands run side by side, each one on a
single thread, so that the figures do not depend on the number of cores. The same call continues what was killed.
"""

import argparse
import dataclasses
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from prb_jax.commands.quickstart.recipe import (
    Recipe,
    config_json,
    make_start,
    train_word_tokenizer,
    training_pairs,
)
from prb_jax.metrics.prediction import Cells, draw_weights, pooled
from prb_jax.metrics.uncertainty import mean_interval
from prb_jax.models.checkpoints.save import save_params
from prb_jax.models.config.decoder import parse_config
from prb_jax.models.model import init_params
from prb_jax.models.vocabulary_heads import LanguageHead
from prb_jax.records.comparison import Comparison
from prb_jax.records.sources import personas
from prb_jax.records.writing import json_line
from prb_jax.runs.behaviour import Figure, pool, read_behaviour, reward_identity
from prb_jax.text.open_tokenizer import load_tokenizer

TRUTH = "baseline:persona-truth"
POSTS = 6
QUIET = "log.tensorboard=false log.plot=false"

# The policy: a quarter of a million parameters and a tokenizer of the most frequent words.
POLICY = Recipe(hidden_size=64, intermediate_size=192, layers=2, heads=2, vocab_size=2048, profiles=4)
HELD_OUT = 8  # of the forty persons of the training part: by them settings of policies were chosen
ROWS = 32_000  # of its supervised training
SFT = (
    f"configs/rl/sft.py profile_posts={POSTS} batch.prompts=16 steps=1500 optimizer.learning_rate=5e-3 "
    f"optimizer.warmup_share=0.03 checkpoint.every=400 {QUIET}"
)

# The reward models.
REWARDS = Recipe(profiles=2, generic_repeats=1)
SMALL = (
    "tuning=full batch.comparisons=64 optimizer.weight_decay=0.1 optimizer.b2=0.98 optimizer.final_share=0.05 "
    f"loss.label_smoothing=0.1 loss.user_weights=false validation.fraction=0 {QUIET}"
)
BLIND = f"configs/bt_user_blind.py {SMALL} optimizer.learning_rate=5e-3"
PROFILE = f"configs/bt_profile_context.py {SMALL} optimizer.learning_rate=1e-2"
LESS = "limit=9600"  # what so few steps do not see is not read
TRAINED = {  # name: how many of ten labels are exchanged in its data, config and settings
    "blind": (0, f"{BLIND} steps=100"),
    "profile_100": (0, f"{PROFILE} {LESS} steps=100"),
    "profile_400": (0, f"{PROFILE} steps=400"),
    "profile_800": (0, f"{PROFILE} steps=800"),
    "two_posts": (0, f"{PROFILE} {LESS} steps=150 profile_posts=2"),
    "noisy_2": (2, f"{PROFILE} {LESS} steps=150"),
    "noisy_4": (4, f"{PROFILE} {LESS} steps=150"),
}
METHOD, SHOTS, BACKBONE = "offset", 16, "profile_400"
FITTED = "sixteen_shots"
BASELINES = ("baseline:length", "baseline:profile-overlap")

# What the policy writes, and how it is changed.
TOKENS = 64
SHOWN = f"--profile-posts {POSTS} --max-new-tokens {TOKENS}"
DRAWN = (
    f"profile_posts={POSTS} rollout.n=8 rollout.temperature=1 rollout.max_new_tokens={TOKENS} scoring.empty=0 "
    f"watch.gold={TRUTH} {QUIET}"
)
DRAWING = (
    "configs/rl/profile_in_prompt.py tuning=full kl.estimator=k3 kl.place=loss kl.coefficient=0.02 batch.prompts=16 "
    "batch.minibatch=16 batch.epochs=1 optimizer.warmup_share=0.05 optimizer.learning_rate=6e-4 steps=80 "
    f"watch.every=10 checkpoint.every=40 {DRAWN}"
)
ONLINE = {
    "grpo": f"{DRAWING} algorithm=grpo",
    "ppo": f"{DRAWING} algorithm=ppo advantage.lam=1 value.trunk=shared",
}
AS_IT_IS = f"{DRAWING} algorithm=grpo optimizer.learning_rate=0.0 steps=1 watch.every=1"
PROMPTS = 800  # of the training part, with 16 samples each, for what is trained on chosen samples
OFFLINE = {
    "sft": f"configs/rl/sft.py batch.prompts=16 steps=100 optimizer.learning_rate=1e-3 {DRAWN}",
    "dpo": f"configs/rl/dpo.py tuning=full batch.prompts=16 steps=100 optimizer.learning_rate=3e-4 {DRAWN}",
}

SEEDS = {"grpo": (0, 1), "sft": (0,), "dpo": (0,), "ppo": (0, 1)}
"""Of each algorithm; the seed of SFT and DPO decides the order of their data alone."""

Job = tuple[str, str]
"""A name, which is a path in the folder of the study, and a command of `prb`."""


class Study:
    """The folder of a study: runs commands, and knows those that are done.

    Args:
      out: the folder.
      workers: commands that run side by side.
    """

    def __init__(self, out: Path, workers: int) -> None:
        self.out, self.workers = out, workers
        # On one thread sums have one order, on whatever machine.
        flags = "--xla_cpu_multi_thread_eigen=false"
        self.environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip

    def run(self, jobs: Iterable[Job]) -> None:
        """Run commands side by side; end where one fails."""
        with ThreadPoolExecutor(self.workers) as pool_of_threads:
            list(pool_of_threads.map(self._run_one, jobs))

    def _run_one(self, job: Job) -> None:
        name, command = job
        done, log = self.out / "done" / name, self.out / "logs" / f"{name}.log"
        if done.exists() and done.read_text(encoding="utf-8") == command:
            return
        print(f"$ prb {command}", flush=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as text:
            words = [sys.executable, "-m", "prb_jax", *shlex.split(command)]
            status = subprocess.run(
                words, env=self.environment, stdout=text, stderr=subprocess.STDOUT
            ).returncode
        if status:
            print(f"{name} failed; the end of {log}:\n{log.read_text(encoding='utf-8')[-2000:]}", flush=True)
            os._exit(status)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.write_text(command, encoding="utf-8")


def shown_rows(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """The records of comparisons, without what is private."""
    hidden = ("rubric_aspects", "narrative")
    return [{key: x for key, x in one.to_row().items() if key not in hidden} for one in comparisons]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write records as JSON lines."""
    path.write_bytes(b"".join(map(json_line, rows)))


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


def exchanged_labels(rows: Sequence[dict[str, Any]], of_ten: int) -> list[dict[str, Any]]:
    """The records with chosen and rejected exchanged in so many of ten."""
    swap = {"chosen": "rejected", "rejected": "chosen"}
    return [
        {swap.get(key, key): value for key, value in row.items()} if number % 10 < of_ten else row
        for number, row in enumerate(rows)
    ]


def exchanged_people(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with posts of the next person in the place of the person's own; the truth is that of the person."""
    of_person: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_person.setdefault(row["user_id"], []).append(row)
    people = sorted(of_person)
    exchanged = []
    for person, following in zip(people, [*people[1:], people[0]], strict=True):
        others = of_person[following]
        exchanged += [
            row | {"profile": others[number % len(others)]["profile"]}
            for number, row in enumerate(of_person[person])
        ]
    return exchanged


def prepare(out: Path) -> None:
    """Write the untrained policy, the small model that reward models start from, and the data."""
    if (out / "prepared").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    train, more = personas.load("train"), personas.load("train-more-wording")
    generic = personas.load("generic-train")
    make_policy(out / "untrained", train)
    make_start(out / "untrained_reward", [*train, *more, *generic], REWARDS)
    labelled = shown_rows(training_pairs([*train, *more], generic, REWARDS))
    for of_ten in {share for share, _ in TRAINED.values()}:
        write(out / f"train_{of_ten}.jsonl", exchanged_labels(labelled, of_ten))
    write(out / "persons.jsonl", shown_rows(train[::4]))

    draws = random.Random(0)
    held = set(draws.sample(sorted({one.user_id or "" for one in train}), HELD_OUT))
    prompts = [one for one in train if one.user_id not in held]
    draws.shuffle(prompts)
    write(out / "prompts.jsonl", shown_rows(prompts))
    write(out / "held.jsonl", shown_rows(some_of_each((one for one in train if one.user_id in held), 16)))
    draws = random.Random(0)
    answers = shown_rows(training_pairs([one for one in train if one.user_id not in held], [], POLICY))
    draws.shuffle(answers)
    answers = answers[:ROWS]
    for row in answers[
        1::2
    ]:  # what it writes depends on the person a little: two posts in the place of the answer
        row["chosen"] = " ".join(post["text"] for post in draws.sample(row["profile"][:POSTS], 2))
    write(out / "answers.jsonl", answers)

    seen, unseen = personas.load("test-seen"), personas.load("test-unseen")
    test = [*seen[::3], *unseen[::3]]
    write(out / "test.jsonl", shown_rows(test))
    tested = {one.id for one in test}
    history = [one for one in (*seen, *unseen) if one.id not in tested]
    write(out / "history.jsonl", shown_rows(some_of_each(history, SHOTS)))
    asked = [*some_of_each(seen[::3], 2), *some_of_each(unseen[::3], 12)]
    write(out / "asked.jsonl", shown_rows(asked))
    write(
        out / "exchanged.jsonl",
        exchanged_people([row for row in shown_rows(asked) if row["subset"] == "personal-unseen"]),
    )
    (out / "prepared").touch()


def make_policy(folder: Path, comparisons: Sequence[Comparison]) -> None:
    """Write a policy with random weights, and a tokenizer of the words of these comparisons."""
    train_word_tokenizer(comparisons, folder, vocab_size=POLICY.vocab_size, splits_words=False)
    tokenizer = load_tokenizer(folder)
    raw = config_json(POLICY, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_token_id)
    raw |= {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": True}
    config = dataclasses.replace(parse_config(raw, where="policy"), head=LanguageHead(tied=True))
    params = init_params(config, seed=0)
    params.pop("score", None)
    # Tied embeddings of size one would make logits of size eight: a loss of eighteen to begin with.
    params["embed"] = 0.1 * params["embed"]
    save_params(params, config, folder, raw_config=raw)


def models_of(out: Path) -> dict[str, str]:
    """Each reward model as a command takes it, by name; the truth is the last one."""
    trained = {name: f"{out}/models/{name}" for name in TRAINED}
    fitted = {FITTED: f"{out}/study/fitted/{METHOD}"}
    return trained | fitted | {name.removeprefix("baseline:"): name for name in (*BASELINES, TRUTH)}


def history_of(out: Path, name: str, option: str) -> str:
    """The choices of each person, for the model that learns from them."""
    return f"{option}{out}/history.jsonl" if name == FITTED else ""


def run_all(study: Study) -> None:
    """Run all commands but the last one, which compares."""
    out = study.out
    prepare(out)
    asked, start = f"{out}/asked.jsonl", f"{out}/start"
    study.run(
        [
            ("start", f"ppo {SFT} model={out}/untrained data={out}/answers.jsonl --out {start}"),
            *(
                (
                    f"models/{name}",
                    f"train {settings} model={out}/untrained_reward data={out}/train_{of_ten}.jsonl "
                    f"--out {out}/models/{name}",
                )
                for name, (of_ten, settings) in TRAINED.items()
            ),
        ]
    )
    persons = f"--data {out}/persons.jsonl"
    study.run([("features", f"features {out}/models/{BACKBONE} {persons} --out {out}/features")])
    study.run(
        [
            (
                "study",
                f"personalise {persons} --backbone {out}/features --methods {METHOD} --shots 0,{SHOTS} "
                f"--split other-question --seeds 1 --out {out}/study",
            ),
            ("samples", f"sample {start} --data {asked} {SHOWN} --n 16 --out {out}/samples"),
            (
                "more_samples",
                f"sample {start} --data {out}/prompts.jsonl --limit {PROMPTS} {SHOWN} --n 16 --out {out}/more_samples",
            ),
        ]
    )
    models = models_of(out)
    rewarded = f"--rewards {' '.join(models.values())} --history {out}/history.jsonl"
    study.run(
        [
            *(
                (
                    f"scores/{name}",
                    f"evaluate {model} --data {out}/test.jsonl {history_of(out, name, '--history ')} "
                    f"--out {out}/scores/{name}",
                )
                for name, model in models.items()
            ),
            ("best", f"best-of-n --samples {out}/samples {rewarded} --quality {TRUTH} --out {out}/best"),
            ("more_best", f"best-of-n --samples {out}/more_samples {rewarded} --out {out}/more_best"),
            *((name, look_at(out, f"{start}/model", name)) for name in ("start_as_it_is", "start_exchanged")),
        ]
    )
    study.run(
        (f"pairs/{name}", f"distil {out}/more_best --reward {model} --out {out}/pairs/{name}")
        for name, model in models.items()
    )
    study.run(behaviours(out, models))


def look_at(out: Path, model: str, name: str) -> str:
    """A command that writes texts of a policy as it is, by GRPO with a learning rate of 0."""
    people = "exchanged" if name.endswith("_exchanged") else "asked"
    return (
        f"ppo {AS_IT_IS} model={model} data={out}/prompts.jsonl reward={TRUTH} watch.data={out}/{people}.jsonl "
        f"--out {out}/{name}"
    )


def behaviours(out: Path, models: dict[str, str]) -> list[Job]:
    """The commands that change what the policy writes, first of all by the truth."""
    order = sorted(models, key=lambda name: models[name] != TRUTH)

    def trained(algorithm: str, seed: int) -> list[Job]:
        jobs = []
        for name in order:
            folder = f"{algorithm}/{name}_{seed}"
            data = f"{out}/prompts.jsonl" if algorithm in ONLINE else f"{out}/pairs/{name}/pairs.jsonl"
            jobs.append(
                (
                    folder,
                    f"ppo {(ONLINE | OFFLINE)[algorithm]} model={out}/start/model data={data} reward={models[name]} "
                    f"{history_of(out, name, 'scoring.history=')} watch.data={out}/asked.jsonl seed={seed} "
                    f"--out {out}/{folder}",
                )
            )
        return jobs

    guided = [
        (
            f"guided/{name}",
            f"guide {out}/start --reward {models[name]} {history_of(out, name, '--history ')} "
            f"--data {out}/asked.jsonl {SHOWN} --chunk 16 --candidates 4 --temperature 1 --weight 1000 "
            f"--quality {TRUTH} --out {out}/guided/{name}",
        )
        for name in order
    ]
    accuracy = (
        "policy_accuracy",
        f"policy-accuracy {out}/start --rewards {' '.join(models.values())} --history {out}/history.jsonl "
        f"--data {out}/test.jsonl --limit 200 --candidates 0 --score seq_score --profile-posts {POSTS} "
        f"--out {out}/policy_accuracy",
    )
    repetitions = [(seed, kind) for seed in (0, 1) for kind, seeds in SEEDS.items() if seed in seeds]
    jobs = [job for seed, kind in repetitions for job in trained(kind, seed)]
    truth = order[0]
    look = f"{truth}_exchanged"
    return [*guided, accuracy, *jobs, (look, look_at(out, f"{out}/grpo/{truth}_0/model", look))]


def figures_of_start(out: Path) -> dict[str, float]:
    """What the policy is worth before anything is learned, by the names of behaviours."""
    means = held_out_means(out / "start_as_it_is")
    start = {f"{name} gold, {part}": mean for name in SEEDS for part, mean in means.items()}
    (drawn,) = read_rows(out / "start_as_it_is" / "gold.jsonl")
    start |= {f"{name} gold": drawn["gold"] for name in ONLINE}
    any_sample = json.loads((out / "best" / "summary.json").read_text())["curves"]["random"][0]["quality"]
    return start | {"guided quality": any_sample}


def held_out_means(run: Path) -> dict[str, float]:
    """The true satisfaction by texts for prompts that were not trained on: of all, and of each subset."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return {part: means["gold"]["value"] for part, means in summary["held_out"].items()}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def texts_of(run: Path) -> list[dict[str, Any]]:
    """The texts that a policy wrote in the end for prompts that it was not trained on."""
    return read_rows(run / "held_out.jsonl")


def told(values: Sequence[float], users: Sequence[str]) -> str:
    """A mean with its 95 % interval over persons."""
    return f"{np.mean(values):+.3f} {in_brackets(mean_interval(np.asarray(values), users).to_json()['ci95'])}"


def in_brackets(ends: Sequence[float] | None, form: str = "+.3f") -> str:
    """An interval."""
    return "" if ends is None else f"[{ends[0]:{form}}, {ends[1]:{form}}]"


def pooled_cell(figures: Sequence[Figure], form: str = "+.3f") -> str:
    """A figure of all seeds, its 95 % interval over persons, and its value for each seed."""
    whole = pool(figures)
    columns = (np.asarray(column, np.float64)[:, None] for column in (whole.sums, whole.counts))
    (ends,) = pooled(Cells(*columns), draw_weights(len(whole.clusters), draws=2000, seed=0)).intervals()
    seeds = ", ".join(f"{figure.value:{form}}" for figure in figures)
    return f"{whole.value:{form}} {in_brackets(ends, form)}" + (f"; {seeds}" if len(figures) > 1 else "")


def gate_table(out: Path, truth: str) -> list[str]:
    """What GRPO by the truth gained, on people it never saw, with their own posts and with those of another."""
    lines = ["| texts for | start | after GRPO by the truth | gain |", "|---|---|---|---|"]
    for people, name in (("unseen persons", "as_it_is"), ("unseen persons, posts of another", "exchanged")):
        after_run = out / (f"{truth}_exchanged" if name == "exchanged" else f"grpo/{truth}_0")
        before, after = (
            {(row["id"], row["rollout"]): row for row in texts_of(run) if row["subset"] == "personal-unseen"}
            for run in (out / f"start_{name}", after_run)
        )
        users = [row["user_id"] for row in before.values()]
        columns = [[texts[key]["gold"] for key in before] for texts in (before, after)]
        columns.append([after[key]["gold"] - before[key]["gold"] for key in before])
        lines.append(f"| {' | '.join([people, *(told(values, users) for values in columns)])} |")
    return lines


def model_table(out: Path, models: dict[str, str]) -> list[str]:
    """Accuracy and every behaviour of each reward model."""
    runs = [out / "best", out / "policy_accuracy", *(out / "guided" / name for name in models)]
    runs += [
        out / kind / f"{name}_{seed}" for kind, seeds in SEEDS.items() for name in models for seed in seeds
    ]
    figures = [figure for run in runs for figure in read_behaviour(run)]
    behaviour = {"policy accuracy": "policy accuracy (seq_score)", "best of 16": "best-of-16"}
    behaviour["guided"] = "guided quality"
    behaviour |= {kind.upper(): f"{kind} gold, personal-unseen" for kind in SEEDS}
    heads = ["reward model", "accuracy, seen", "unseen", *behaviour]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in models:
        run = out / "scores" / name
        identity = reward_identity(json.loads((run / "run.json").read_text())["inputs"]["model"])
        subsets = json.loads((run / "summary.json").read_text())["accuracy_by_subset"]
        of_model = [figure for figure in figures if figure.reward_model == identity]
        cells = [f"`{name}`", *(f"{subsets[f'personal-{who}']:.3f}" for who in ("seen", "unseen"))]
        for wanted in behaviour.values():
            form = ".3f" if wanted.startswith("policy accuracy") else "+.3f"
            cells.append(pooled_cell([figure for figure in of_model if figure.name == wanted], form))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def correlation_table(out: Path) -> list[str]:
    """What the truth gains in each behaviour, and what `prb correlate` found where that is enough."""
    result = json.loads((out / "correlation" / "correlate.json").read_text())
    correlations = {row["behaviour"]: row["measures"] for row in result["correlations"]}
    heads = ("behaviour", "the truth gains", "Pearson", "p", "Spearman", "p", "Kendall", "p")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for behaviour, gate in result["gates"].items():
        gain = gate["improvement"]
        cells = [behaviour, "not known" if gain is None else f"{gain:+.3f} {in_brackets(gate['ci95'])}"]
        measures = correlations.get(behaviour)
        for name in ("pearson", "spearman", "kendall"):
            measure: dict[str, Any] = {"value": None} if measures is None else measures[name]
            if measure["value"] is None:
                cells += ["no power", ""]
            else:
                p = "< 0.001" if measure["p"] < 1e-3 else f"{measure['p']:.3f}"
                cells += [f"{measure['value']:+.2f} {in_brackets(measure['ci95'], '+.2f')}", p]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(out: Path, models: dict[str, str]) -> None:
    """Draw the curves: the truth against steps and against the KL, the proxy against the KL, and the best of n."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, len(ONLINE) + 1, figsize=(16, 9))
    colors = {name: pyplot.get_cmap("tab20")(number) for number, name in enumerate(models)}
    for column, algorithm in enumerate(ONLINE):
        for name in models:
            seeds = [
                read_rows(out / algorithm / f"{name}_{seed}" / "gold.jsonl") for seed in SEEDS[algorithm]
            ]
            curves = {
                key: np.mean([[row[key] for row in rows] for rows in seeds], axis=0)
                for key in ("step", "kl", "gold", "reward")
            }
            style: dict[str, Any] = {"color": colors[name], "label": name, "marker": ".", "linewidth": 1}
            panels[0, column].plot(curves["step"], curves["gold"], **style)
            panels[1, column].plot(np.sqrt(np.maximum(curves["kl"], 0)), curves["gold"], **style)
        panels[0, column].set(
            xlabel="step", ylabel="true satisfaction of the rollouts", title=algorithm.upper()
        )
        panels[1, column].set(xlabel="square root of the KL from the start", ylabel="true satisfaction")
        if column == 0:
            panels[0, 0].legend(fontsize=7, ncols=2)
    curves = json.loads((out / "best" / "summary.json").read_text())["curves"]
    for name, model in models.items():
        points = curves[model]
        numbers, values = ([point[key] for point in points] for key in ("k", "quality"))
        panels[0, -1].plot(numbers, values, color=colors[name], label=name, marker=".", linewidth=1)
    panels[0, -1].set(xlabel="samples", ylabel="true satisfaction", xscale="log", title="best of n")
    for name, (accuracy, values) in scatter(out, models).items():
        panels[1, -1].scatter(accuracy, values, color=colors[name], s=18)
    panels[1, -1].set(
        xlabel="accuracy on labelled pairs", ylabel="true satisfaction after GRPO, unseen persons"
    )
    figure.tight_layout()
    figure.savefig(out / "study.png", dpi=90)
    pyplot.close(figure)


def scatter(out: Path, models: dict[str, str]) -> dict[str, tuple[list[float], list[float]]]:
    """Accuracy and true satisfaction of unseen persons after GRPO, a point for each seed."""
    points = {}
    for name in models:
        summary = json.loads((out / "scores" / name / "summary.json").read_text())
        runs = [out / "grpo" / f"{name}_{seed}" for seed in SEEDS["grpo"]]
        golds = [held_out_means(run)["personal-unseen"] for run in runs]
        points[name] = ([summary["accuracy"]] * len(golds), golds)
    return points


def compare(study: Study) -> None:
    """Correlate, and write `table.md` and `study.png`."""
    out, models = study.out, models_of(study.out)
    truth = next(name for name, model in models.items() if model == TRUTH)
    scores = " ".join(f"{out}/scores/{name}" for name in models if name != truth)
    behaviour = [f"{out}/best", f"{out}/policy_accuracy", *(f"{out}/guided/{name}" for name in models)]
    behaviour += [
        f"{out}/{kind}/{name}_{seed}" for kind, seeds in SEEDS.items() for name in models for seed in seeds
    ]
    start = shlex.join(f"{name}={value:.6f}" for name, value in figures_of_start(out).items())
    study.run(
        [
            (
                "correlation",
                f"correlate --scores {scores} --behaviour {' '.join(behaviour)} --figures accuracy --start {start} "
                f"--plan --out {out}/correlation",
            )
        ]
    )
    tables = (gate_table(out, truth), model_table(out, models), correlation_table(out))
    text = "\n\n".join("\n".join(lines) for lines in tables) + "\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    draw(out, models)
    print(
        f"\n{text}\nwritten: {out / 'table.md'}, {out / 'study.png'}, {out / 'correlation' / 'correlate.png'}"
    )


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    study = Study(given.out, given.workers)
    run_all(study)
    compare(study)


if __name__ == "__main__":
    main()
