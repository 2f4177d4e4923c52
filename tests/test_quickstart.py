"""The quickstart, end to end with a tiny recipe; what its models learn in full is measured, not tested here."""

import re
import shutil

import numpy as np
import pytest

from prb_jax import RunError, cli, evaluate, load, read_comparisons
from prb_jax.commands.quickstart import Recipe, Schedule, quickstart, quickstart_table
from prb_jax.commands.quickstart.command import PENALTY, fit_persona_words
from prb_jax.commands.quickstart.recipe import training_pairs
from prb_jax.records.sources.personas import load as load_part
from prb_jax.training.config import load_settings
from tests.scoring.records import read_json, score_rows

PAIRS = 40
TINY = Recipe(
    hidden_size=16,
    intermediate_size=16,
    heads=2,
    vocab_size=400,
    user_blind=Schedule(steps=3, learning_rate=1e-3, comparisons=8),
    persona=Schedule(steps=3, learning_rate=1e-3, comparisons=8),
    profiles=2,
    limit=PAIRS,
)
ACCURACIES = {
    "generic_accuracy",
    *(f"personalised_accuracy_{part}" for part in ("seen", "unseen", "unseen_wording")),
}
FIGURES = ACCURACIES | {"served", "train_pairs", "presentations", "ms_per_pair"}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return quickstart(out=tmp_path_factory.mktemp("runs") / "a" / "quickstart", recipe=TINY, progress=False)


def test_the_summary_has_the_figures_of_every_model(result):
    summary = read_json(result.path)
    assert summary == result.summary
    models = summary["models"]
    baselines = ["baseline:length", "baseline:random", "baseline:profile-overlap"]
    assert list(models) == ["user_blind", "persona", *baselines, "persona x words"]
    for name, figures in models.items():
        assert set(figures) >= FIGURES
        if name != "persona x words":
            assert figures["presentations"] == (0 if name in baselines else 3 * 8)  # three steps of eight
        for key in ACCURACIES:
            assert 0 <= figures[key] <= 1
        low, high = figures["generic_accuracy_ci95"]
        assert low <= figures["generic_accuracy"] <= high
        assert 0 < figures["ms_per_pair"] < 1000
        assert figures["train_pairs"] == (0 if name in baselines else 3 * PAIRS)
    iterations, rest = divmod(models["persona x words"]["presentations"], 3 * PAIRS)  # all pairs in each
    assert (iterations > 3, rest) == (True, 0)
    blind, aware = summary["bounds"].values()
    assert list(blind.values()) == pytest.approx([0.538] * len(blind), abs=0.002)  # the Bayes accuracy
    assert min(aware.values()) >= 0.95


def test_what_it_leaves_are_runs_of_train_and_evaluate(result):
    for name, posts in (("user_blind", 0), ("persona", 10)):
        scores = result.out / "scores" / name
        assert read_json(scores / "run.json")["inputs"]["profile_posts"] == posts
        rows = score_rows(scores)
        assert len(rows) == 4 * PAIRS
        settings = load_settings(result.out / f"{name}.py")
        assert settings.view.profile_posts == posts
        record = read_json(result.out / name / "train.json")
        assert record["inputs"]["settings"]["steps"] == settings.steps == 3
        scores = load(result.out / name).score(load_part("generic-test")[0])
        assert scores.tolist() == pytest.approx(rows[0]["scores"], abs=1e-6)  # other batches: other rounding


def test_only_the_persona_model_sees_profiles(result):
    model = load(result.out / "persona")
    text = model.tokenizer.tokenizer.decode(model.encode(load_part("test-seen")[:1])[0].prefix)
    assert "what this user wrote before" in text
    pairs = read_comparisons(result.out / "data" / "persona.jsonl.gz")
    assert all(pair.profile and not pair.narrative and not pair.rubric_aspects for pair in pairs)


def test_further_copies_of_a_pair_show_other_profiles():
    """A personalised pair those of its user, a generic one anybody's."""
    train, generic = load_part("train")[:300], load_part("generic-train")[:50]
    recipe = Recipe(profiles=3, generic_repeats=1)
    pairs = training_pairs(train, generic, recipe)
    assert len(pairs) == len({pair.id for pair in pairs}) == 3 * 350
    assert pairs == training_pairs(train, generic, recipe)
    sources = {pair.id: pair for pair in (*train, *generic)}
    shown = {}
    for pair in sources.values():
        shown.setdefault(pair.user_id, set()).update(post.id for post in pair.profile)
    changed, foreign = 0, 0
    for pair in pairs:
        source = sources[pair.id.removesuffix("-1").removesuffix("-2")]
        assert (pair.responses, pair.labels) == (source.responses, source.labels)
        changed += pair.profile != source.profile
        other = not {post.id for post in pair.profile} <= shown[pair.user_id]
        assert not (other and pair.id.startswith("train"))
        foreign += other
    assert changed > 500
    assert foreign > 80


def test_the_linear_model_learns_the_words_that_each_persona_chose():
    """At the fitted weights the gradient of the penalised loss is 0."""
    pairs = [*load_part("train")[:1500], *load_part("generic-train")[:200]]
    model = fit_persona_words(pairs)
    gradient = {None: PENALTY * model.common}
    gradient |= {persona: PENALTY * weights for persona, weights in model.own.items()}
    for pair in pairs:
        chosen, rejected = model(pair)
        share = 1 / (1 + np.exp(chosen - rejected))
        words = [set(re.findall(r"\w+|[^\w\s]", text.lower())) for text in pair.responses]
        for word in words[0] ^ words[1]:
            if word in model.columns:
                step = share if word in words[0] else -share
                gradient[None][model.columns[word]] -= step
                gradient[pair.user_id][model.columns[word]] -= step
    assert max(np.abs(one).max() for one in gradient.values()) < 1.0
    stranger = load_part("test-unseen")[0]
    assert stranger.user_id not in model.own
    seen = load_part("test-seen")
    assert np.mean([chosen > rejected for chosen, rejected in map(model, seen)]) > 0.7


def test_the_report_says_what_was_done_and_the_page_shows_both_models_and_their_training(result):
    for file, texts in (
        (result.report, ("| user-blind |", "prb train ", "prb evaluate ", "paired", "best, user known")),
        (
            result.page,
            (
                ">persona<",
                ">user_blind<",
                ">persona: training<",
                ">user_blind: training<",
                "Pairs to read",
                "<svg",
            ),
        ),
    ):
        page = file.read_text(encoding="utf-8")
        assert [text for text in texts if text not in page] == []


@pytest.mark.slow
def test_a_finished_one_is_read_and_a_killed_one_continued(result, tmp_path):
    again = quickstart(out=result.out, recipe=TINY, progress=False)
    assert again.summary == result.summary
    copy = shutil.copytree(result.out, tmp_path / "copy")
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "scores" / "persona")
    before = (copy / "persona" / "model" / "model.safetensors").stat().st_mtime_ns
    continued = quickstart(out=copy, recipe=TINY, progress=False)
    assert (copy / "persona" / "model" / "model.safetensors").stat().st_mtime_ns == before

    def accuracies(summary):
        return {
            name: {key: value for key, value in figures.items() if key != "ms_per_pair"}
            for name, figures in summary["models"].items()
        }

    assert accuracies(continued.summary) == accuracies(result.summary)


def test_another_run_is_not_overwritten(result, tmp_path):
    pair = {"id": "1", "question": "?", "chosen": "a", "rejected": "b"}
    evaluate("baseline:length", [pair], out=tmp_path / "run", progress=False)
    for name, text in (("broken", "{"), ("foreign", '{"kind": "x"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "quickstart.json").write_text(text)
    for out, message in (
        (result.out, r"recipe\.persona\.steps: 3 -> "),
        (tmp_path / "run", "holds another run"),
        (tmp_path / "run" / "run.json", "is a file"),
        (tmp_path / "broken", "not valid JSON"),
        (tmp_path / "foreign", "not a record of `prb quickstart`"),
    ):
        with pytest.raises(RunError, match=message):
            quickstart(out=out, progress=False)


def test_from_the_command_line(result, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("prb_jax.commands.quickstart.command.Recipe", lambda: TINY)
    assert cli.main(["quickstart", "--out", str(result.out)]) == 0
    shown = capsys.readouterr().out
    named = ("profile-overlap", "unseen", "wording", "best, user", "known", "summary.json", "report.md")
    for text in (*named, f"page: {result.page}", f"prb evaluate {result.out}/persona --data"):
        assert text in shown
    figures = result.summary["models"]["persona"]
    assert f"{figures['generic_accuracy']:.3f}" in shown
    low, high = figures["personalised_accuracy_unseen_wording_ci95"]
    assert f" {low:.3f}..{high:.3f} " in shown  # whole, in 80 columns
    assert max(map(len, shown[: shown.index("figures:")].splitlines())) <= 80
    assert quickstart_table(result.summary).renderables[1].rows[-3] == []


def test_the_benchmark_as_files(tmp_path, capsys):
    assert cli.main(["personas", "--out", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(list(tmp_path.iterdir())) == 7
    assert read_comparisons(tmp_path / "test-unseen.jsonl.gz") == read_comparisons("personas:test-unseen")
