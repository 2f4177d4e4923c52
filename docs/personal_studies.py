"""The studies of docs/personal_studies.md: features, methods and tables of five data sets, one command each. gd6 has
two: `gd6` predicts other questions, in `gd6_plain` any other choice of a person may be learned from.

    python docs/personal_studies.py ENCODER DATA OUT [NAME...]

ENCODER is MiniLM (all-MiniLM-L6-v2) or another encoder of texts, DATA the folder of `gd6.jsonl.gz`,
`polis_en.jsonl.gz`, `ukpconvarg1.jsonl.gz` and `prefeval.jsonl.gz`. Every command is printed as it would be typed; the
same call continues what was killed. The tables are written to OUT/NAME.md, the picture of the few-shot curves is
OUT/NAME/curves.svg; with `--table` in the place of ENCODER only the tables are written.
"""

import gzip
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prb_jax.cli import main
from prb_jax.personal.features import open_features
from prb_jax.personal.few_shot import bayes
from prb_jax.personal.few_shot.fitting import minimise
from prb_jax.personal.few_shot.protocol import Fitted
from prb_jax.personal.few_shot.registry import METHODS, POOLED
from prb_jax.records.sources import personas
from prb_jax.scoring.inputs import read_inputs
from prb_jax.study.outcomes import (
    BASELINES,
    PLAIN,
    SplitData,
    make_part,
    read_outcome,
    run_method,
    standardised,
)
from prb_jax.study.population import read_population
from prb_jax.study.results import SIMULATED, subset_results
from prb_jax.study.splits import UNSEEN_PART, make_splits

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A study of one data set.

    Attributes:
      data: the name of the file; None for the generated personas.
      rows: what is used of the rows of the file.
      shots, split: of `prb personalise`.
      seeds: splits; in three of them 30 % of the people are unseen, in five 20 %.
      features: options of `prb features`.
      left_out: methods without a personal part in every split of an earlier run, by choice of the validation part.
      more: tables of this data set alone, from the folder of all studies.
    """

    data: str | None
    rows: Callable[[list[Row]], list[Row]]
    shots: str = "0,1,2,4,8,16"
    split: str = "other-question"
    seeds: int = 3
    features: str = "--responses-alone"
    left_out: tuple[str, ...] = ()
    more: Callable[[Path], list[str]] | None = None


def _whole(rows: list[Row]) -> list[Row]:
    return rows


def _kind(rows: list[Row]) -> list[Row]:
    return [{**row, "subset": row["meta"]["kind"]} for row in rows]


JUDGEMENT = re.compile(r'preferred: "(.*)" over: "(.*?)"\.?\s*(?:Reason given:.*)?$', re.DOTALL)
QUOTED = 20
"""Words of a quotation that tell which argument is quoted; it holds about 40."""


def _judgements(rows: list[Row]) -> list[Row]:
    """The subset says how most other people chose. An earlier judgement becomes two votes, for one argument and against
    another; a quotation becomes the whole argument, so that it is known where it is judged again. The reasons are left
    out, because many of them name the wrong argument."""
    texts = [text for row in rows for text in (row["chosen"], row["rejected"])]
    arguments = {_start(text): text for text in texts}

    def votes(post: Row) -> list[Row]:
        quotations = JUDGEMENT.search(post["text"])
        assert quotations is not None, post
        kinds = ("agreed_with", "disagreed_with")
        return [
            {"id": f"{post['id']} {kind}", "category": kind, "text": arguments.get(_start(text), text)}
            for kind, text in zip(kinds, quotations.groups(), strict=True)
        ]

    return [
        {
            **row,
            "subset": _side(row["meta"]),
            "profile": [vote for post in row["profile"] for vote in votes(post)],
        }
        for row in rows
    ]


def _start(text: str) -> str:
    return " ".join(text.removesuffix("...").split()[:QUOTED])


def _side(meta: Row) -> str:
    agree, against = meta["others_for"], meta["others_against"]
    if agree == against:
        return "no majority"
    return "with the majority" if agree > against else "against the majority"


LEAST = 40
"""Choices of a conversation in the table, at least."""


def run(command: str) -> None:
    """Run one command of `prb`, or end."""
    print(f"\n$ prb {command}", flush=True)
    status = main([*shlex.split(command), "--no-progress"])
    if status:
        sys.exit(status)


def prepare(name: str, data: Path, out: Path) -> Path:
    """Write the rows of a study as a file, and return its path; a file that is there already is kept."""
    study, path = STUDIES[name], out / f"{name}.jsonl"
    if study.rows is _whole and study.data is not None:
        return data / f"{study.data}.jsonl.gz"
    if not path.exists():
        rows = _personas() if study.data is None else _read(data / f"{study.data}.jsonl.gz")
        path.write_text("".join(json.dumps(row) + "\n" for row in study.rows(rows)), encoding="utf-8")
    return path


def _read(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _personas() -> list[Row]:
    """The comparisons of the 50 people whose wordings are alike."""
    return [one.to_row() for part in PERSONAS for one in personas.load(part)]


def _new_wording(out: Path) -> list[str]:
    """Adapt the methods of the first split to 16 comparisons of people of other words, and predict the other ones."""
    groups: dict[str, list[Row]] = {}
    for one in personas.load("test-unseen-wording"):
        groups.setdefault(str(one.user_id), []).append(one.to_row())
    for name, part in (("history", slice(16)), ("wording", slice(16, None))):
        rows = [row for comparisons in groups.values() for row in comparisons[part]]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"personas.{name}.jsonl").write_text(text, encoding="utf-8")
    lines = ["| method | k | accuracy |", "|---|---|---|"]
    data, fitted = out / "personas.wording.jsonl", out / "personas" / "fitted"
    for method in sorted(path.name for path in fitted.iterdir()):
        folder = out / "personas.wording" / method
        run(
            f"evaluate {fitted / method} --data {data} --history {out / 'personas.history.jsonl'} --out {folder}"
        )
        summary = json.loads((folder / "summary.json").read_text())
        lines.append(f"| `{method}` | 16 | {_figure(summary['accuracy'], summary['ci95'])} |")
    parts = [_bound("personal"), _readable(out), "New wording:", "\n".join(lines)]
    return [*parts, _bound("test-unseen-wording")]


def _readable(out: Path) -> str:
    """How much of the tastes can be read from the features, by readers who are told what no method knows."""
    inputs = read_inputs([str(out / "personas.jsonl")])
    population = read_population(inputs.comparisons, open_features(out / "personas.features"))
    made, choices = personas.generate(), population.choices
    tastes = {person.id: person.tastes for person in made.people}
    true = np.array([tastes[population.users[user]] for user in choices.users], np.float32)
    levels = np.array([made.levels[one] for one in population.ids])
    spread = choices.deltas.std(0)
    deltas = choices.deltas / np.where(spread > 1e-6, spread, 1)
    asked = choices.questions % 4 == 0
    seen = deltas[~asked]
    axes = np.linalg.solve(seen.T @ seen + 100 * np.eye(seen.shape[1]), seen.T @ levels[~asked])
    right = np.sum((deltas[asked] @ axes) * true[asked], axis=1) > 0
    lines = [f"A linear reader that knows axes and tastes: {right.mean():.3f} of {len(right):,} choices."]
    study = STUDIES["personas"]
    splits = make_splits(population, by=study.split, seeds=study.seeds)
    parts = [make_part(standardised(choices, split)[0], split) for split in splits]
    for l2 in (0.01, 0.03, 0.1, 0.3):
        adapted, known = _told_the_tastes_of_seen_people(parts, true, l2)
        lines.append(
            f"Directions fitted on the choices of the seen people, whose tastes are told, penalty {l2}: "
            f"{adapted:.3f} after 16 comparisons, {known:.3f} where the tastes of the unseen people are told too."
        )
    return "\n".join(f"- {line}" for line in lines)


def _told_the_tastes_of_seen_people(
    parts: Sequence[SplitData], true: np.ndarray, l2: float
) -> tuple[float, float]:
    """The accuracy on unseen people of the directions that fit the choices of the seen people best, where the true
    tastes of these, float32 [n, 8] for the choices, are told: after 16 comparisons, and with the true tastes."""
    right = list[np.ndarray]()
    for part in parts:
        deltas, trained = jnp.asarray(part.choices.deltas), part.split.trained

        def loss(f: jax.Array, x: jax.Array = deltas[trained], t: np.ndarray = true[trained]) -> jax.Array:
            return jnp.mean(jax.nn.softplus(-jnp.sum((x @ f) * t, axis=1))) + 0.5 * l2 * jnp.sum(f * f)

        axes = np.asarray(minimise(loss, jnp.zeros((deltas.shape[1], true.shape[1])), steps=200))
        nothing = np.zeros(len(axes), np.float32)
        arrays = {"direction": nothing, "basis": axes, "items": np.zeros(1, np.float32)}
        prior = Fitted(arrays, {"isotropic": np.float32(0)}, bayes.BayesSettings())
        outcome, _ = run_method(bayes.METHOD, prior, part, shots=(16,), mesh=None)
        places = outcome.places
        known = np.sum((part.choices.deltas[places] @ axes) * true[places], axis=1)
        unseen = part.split.part[part.choices.users[places]] == UNSEEN_PART
        right.append(np.stack([outcome.margins[PLAIN, 16] > 0, known > 0], axis=1)[unseen])
    return tuple(np.concatenate(right).mean(axis=0))


def _bound(part: str) -> str:
    return f"The Bayes bound of {part}: {personas.generate().ceilings[part].persona_aware:.3f}."


def _by_conversation(out: Path) -> list[str]:
    """`bayes` on the pairs of each conversation, with two shots."""
    study, folder = STUDIES["polis_en"], out / "polis_en"
    inputs = read_inputs([str(out / "polis_en.jsonl")])
    population = read_population(inputs.comparisons, open_features(out / "polis_en.features"))
    splits = make_splits(population, by=study.split, seeds=study.seeds)
    topics = {one.id: f"{one.subset}: {one.category}" for one in inputs.comparisons}
    outcomes = {
        name: [read_outcome(folder / "outcomes" / f"{name}-{split.seed}.npz") for split in splits]
        for name in ("pooled", "offset", "bayes")
    }
    named = replace(population, subsets=tuple(topics[one] for one in population.ids))
    rows = [
        row
        for row in subset_results(named, splits, outcomes)
        if row["method"] == "bayes" and row["shots"] == 2 and row["n"] >= LEAST
    ]
    lines = ["| conversation | choices | accuracy | minus pooled | by the person |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["subset"].partition(":")[0], -row["n"])):
        lines.append(
            f"| {row['subset']} | {row['n']:,} | {_figure(row['accuracy'], row['accuracy_ci95'])} | "
            f"{_figure(row['diff_to_pooled'], row['diff_to_pooled_ci95'], signed=True)} | "
            f"{_figure(row['gain_from_user'], row['gain_from_user_ci95'], signed=True)} |"
        )
    return ["`bayes` by conversation, two shots:", "\n".join(lines)]


def _figure(value: float | None, interval: list[float] | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    shown = f"{value:+.3f}" if signed else f"{value:.3f}"
    return shown if interval is None else f"{shown} [{interval[0]:.3f}, {interval[1]:.3f}]"


WHOLE = ("bayes", "stacked")
"""Methods of which a table has every number of shots; other methods have the smallest and the largest."""

EQUAL = 0.0005
"""Largest difference to pooled Bradley-Terry, in accuracy and log-loss, of methods that a table leaves out."""

HEADS = (
    "method", "k", "accuracy", "minus pooled", "minus pooled + offset", "p, Holm", "by the person",
    "log-loss minus pooled", "its p, Holm", "calibration error",
)  # fmt: skip


def table(rows: Sequence[Row], *, shots: Sequence[int]) -> str:
    """Return the rows of a part of the people as a table of Markdown, and the methods that equal pooled."""
    ends, shown, equal = (shots[0], shots[-1]), list[Row](), list[str]()
    order = [*BASELINES, *METHODS]
    for method in sorted({row["method"] for row in rows if not row["control"]}, key=order.index):
        of_method = [row for row in rows if row["method"] == method and row["shots"] in shots]
        known = [row for row in of_method if row["accuracy"] is not None]
        if known and method not in (POOLED, *BASELINES) and all(map(_equals_pooled, known)):
            equal.append(f"`{method}`")
            continue
        kept = shots[:1] if method == POOLED else shots if method in WHOLE else ends
        shown += [row for row in known if row["shots"] in kept]
    controls = [row for row in rows if row["control"] and _is_shown(row, shots)]
    shown += sorted(controls, key=lambda row: row["accuracy"] if row["control"] == SIMULATED else 0)
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|", *map(_line, shown)]
    parts = ["\n".join(lines)]
    if equal:
        parts.append(f"Within {EQUAL} of pooled at every k: {', '.join(equal)}.")
    parts += {
        f"No ceiling: {row['reason']}." for row in rows if row["control"] == SIMULATED and row["reason"]
    }
    return "\n\n".join(parts)


def _equals_pooled(row: Row) -> bool:
    gaps = (row["diff_to_pooled"], row["log_loss_diff_to_pooled"])
    return all(gap is None or abs(gap) <= EQUAL for gap in gaps)


def _is_shown(row: Row, shots: Sequence[int]) -> bool:
    """Whether a table has a control: the controls of `bayes`, and the ceilings."""
    method, _, control = row["method"].partition(", ")
    if row["accuracy"] is None:
        return False
    if row["control"] == SIMULATED:
        return row["shots"] in shots
    return method == "bayes" and row["shots"] == (0 if control == "no user" else shots[-1])


def _line(row: Row) -> str:
    """Return a row of results as a line of the table."""

    def signed(name: str) -> str:
        return _figure(row[name], row[f"{name}_ci95"], signed=True)

    p, of_loss = (_p_value(row.get(name)) for name in ("p_holm", "p_log_loss_holm"))
    name, control, rest = row["method"].partition(", ")
    cells = [
        f"`{name}`{control}{rest}" if row["control"] != SIMULATED else row["method"],
        str(row["shots"]),
        _figure(row["accuracy"], row["accuracy_ci95"]),
        *(signed(field) for field in ("diff_to_pooled", "diff_to_offset")),
        p,
        signed("gain_from_user"),
        signed("log_loss_diff_to_pooled"),
        of_loss,
        _figure(row["ece"], None),
    ]
    return f"| {' | '.join(cells)} |"


def _p_value(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def numbers(folder: Path) -> str:
    """Return what the validation part of each split chose for `bayes` and `stacked`, as a table of Markdown."""
    chosen = json.loads((folder / "study.json").read_text())["numbers"]
    rows = {
        f"`{method}`: {name}": [f"{split.get(name, 0):.3g}" for split in chosen[method]]
        for method, names in NUMBERS.items()
        if method in chosen
        for name in names
    }
    count = max(map(len, rows.values()), default=0)
    heads = ["number", *(f"split {split + 1}" for split in range(count))]
    lines = [heads, ["---"] * len(heads), *([name, *values] for name, values in rows.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


NUMBERS = {
    "bayes": (
        "l2", "item_precision", "counted", "rank", "scale", "basis_l2", "spread", "profile_l2", "word_gain",
        "vote_gain", "text_rank", "text_scale", "slope",
    ),
    "stacked": ("nobody.weight", "simple.weight", "bayes.weight", "slope"),
}  # fmt: skip


def write_table(name: str, folder: Path, out: Path) -> None:
    """Write the tables of a finished study: all choices, and each subset with the largest number of shots."""
    results = json.loads((folder / "results.json").read_text())
    counts = [int(text) for text in STUDIES[name].shots.split(",")]
    unseen, seen = ([row for row in results if row["split"] == part] for part in ("unseen", "seen"))
    tested = sum(row["p_log_loss_holm"] is not None for row in unseen)
    parts = [
        f"{unseen[0]['n']:,} choices of {unseen[0]['users']:,} unseen people; {tested} tested rows.",
        table(unseen, shots=counts),
        numbers(folder),
    ]
    controls = [
        row
        for row in unseen
        if row["control"] in ("no user", "no profile") and row["shots"] in (0, counts[-1])
    ]
    parts.append(
        "\n".join(
            f"- {row['method']}, k = {row['shots']}: {_figure(row['accuracy'], row['accuracy_ci95'])}, log-loss minus "
            f"pooled {_figure(row['log_loss_diff_to_pooled'], row['log_loss_diff_to_pooled_ci95'], signed=True)}"
            for row in controls
        )
    )
    if (path := folder / "subsets.json").exists():
        subsets = json.loads(path.read_text())
        for subset in dict.fromkeys(row["subset"] for row in subsets):
            here = [row for row in subsets if row["subset"] == subset]
            parts.append(f"{subset}: {here[0]['n']:,} choices of {here[0]['users']:,} people.")
            parts.append(table(here, shots=counts[-1:]))
    if seen:
        parts += ["Held-out choices of seen people:", table(seen, shots=counts)]
    more = STUDIES[name].more
    parts += [] if more is None else more(out)
    (out / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"written: {out / name}.md")


NEVER_PERSONAL = ("gpo", "sparse", "user_embedding", "user_clusters")
STUDIES = {
    "gd6": Study(
        "gd6", _whole, shots="0,2,8", features="", left_out=("lore_free", "pal", "mrm", *NEVER_PERSONAL)
    ),
    "gd6_plain": Study(
        "gd6",
        _whole,
        shots="0,2,4,8,10",
        split="user",
        seeds=5,
        features="",
        left_out=("pal", "mrm", *NEVER_PERSONAL),
    ),
    "polis_en": Study(
        "polis_en",
        _kind,
        shots="0,2",
        left_out=("lore_free", "pref", "pal", "mrm", *NEVER_PERSONAL),
        more=_by_conversation,
    ),
    "ukpconvarg1": Study(
        "ukpconvarg1",
        _judgements,
        shots="0,4",
        left_out=("lore_free", "vpl", "pal", "mrm", *NEVER_PERSONAL),
    ),
    "prefeval": Study(
        "prefeval", _whole, shots="0", features="", left_out=("lore_free", "pref", *NEVER_PERSONAL)
    ),
    "personas": Study(
        None,
        _whole,
        shots="0,4,16,128",
        left_out=("vpl", "pal", "gpo", "mrm", "user_embedding", "user_clusters"),
        more=_new_wording,
    ),
}
PERSONAS = ("train", "test-seen", "test-unseen")


def _methods(study: Study) -> str:
    left_out = {*study.left_out, "lora", "lora_users", "profile_in_context"}  # the last three need a decoder
    return ",".join(name for name in METHODS if name not in left_out)


def studies(encoder: str, data: Path, out: Path, names: list[str]) -> None:
    """Run the studies that are named, or all."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names or STUDIES:
        study = STUDIES[name]
        if encoder != "--table":
            path = prepare(name, data, out)
            features = out / f"{study.data or name}.features"
            run(f"features {encoder} --data {path} {study.features} --out {features}")
            run(
                f"personalise --data {path} --backbone {features} --methods {_methods(study)} --shots {study.shots} "
                f"--seeds {study.seeds} --split {study.split} --out {out / name}"
            )
        write_table(name, out / name, out)


if __name__ == "__main__":
    studies(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
