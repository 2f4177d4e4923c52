"""`prb push`: upload the model of a run to the Hugging Face hub, with a card made from the run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prb_jax.errors import RunError, first_line, quote
from prb_jax.models.checkpoints.exported import check_exported
from prb_jax.models.checkpoints.locate import fingerprint, is_exported, locate
from prb_jax.models.config.decoder import no_model
from prb_jax.platform.paths import localised
from prb_jax.reports.page import visible
from prb_jax.reports.summary import gains, headline, scorers
from prb_jax.reports.training import last_figures
from prb_jax.runs.finished import FinishedRun, read_finished
from prb_jax.runs.kind import RUN, SUMMARY
from prb_jax.runs.training import MODEL, TRAIN, TRAINING, TrainingRun, read_training
from prb_jax.scoring.prompt_extras import told_of
from prb_jax.version import __version__

CARD = "README.md"
EVAL_RESULTS = ".eval_results/prb_jax.yaml"
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9])?"
_REPOSITORY = re.compile(f"{_PART}/{_PART}")


@dataclass(frozen=True)
class Upload:
    """Contents of a push: the files of the model, the text of README.md, and the text of `.eval_results/prb_jax.yaml`,
    which is empty if no evaluation uses a data set of the hub."""

    repository: str
    files: Sequence[Path]
    card: str
    results: str


def push(
    run: str | Path,
    repository: str,
    *,
    evaluations: Sequence[str | Path] = (),
    task_id: str = "default",
    private: bool = False,
) -> str:
    """Upload the model of a run in one commit, with a card of its figures, its data and the commands.

    Creates the repository if it does not exist. The login comes from `hf auth login`, or from the variable HF_TOKEN.

    Args:
      run, repository, evaluations, task_id: Same as for :func:`prepare_push`, which shows what would be published.
      private: Make a new repository private.

    Returns:
      The URL of the commit.

    Raises:
      RunError: same as :func:`prepare_push`; or the hub rejects the upload.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    upload = prepare_push(run, repository, evaluations=evaluations, task_id=task_id)
    operations: list[Any] = [CommitOperationAdd(path.name, str(path)) for path in upload.files]
    operations.append(CommitOperationAdd(CARD, upload.card.encode("utf-8")))
    if upload.results:
        operations.append(CommitOperationAdd(EVAL_RESULTS, upload.results.encode("utf-8")))
    api = HfApi(library_name="prb_jax")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.create_commit(
            repository, operations, commit_message="Model and card from a run of prb_jax"
        )
    except Exception as error:  # from the hub, its library or the network; the chain keeps the details
        raise RunError(f"{repository}: the hub refused it: {_reason(error)}") from error
    return str(commit.commit_url)


def prepare_push(
    run: str | Path, repository: str, *, evaluations: Sequence[str | Path] = (), task_id: str = "default"
) -> Upload:
    """Return what :func:`push` would publish, without a connection.

    Args:
      run: Finished run of `prb train`; or a run of `prb evaluate` whose model is a folder that still exists unchanged.
      repository: "ORG/NAME".
      evaluations: Runs of `prb evaluate` with this model; the card gets their tables.
      task_id: Id of the benchmark in the `eval.yaml` of its data set on the hub.

    Raises:
      RunError: the folder contains no finished run, or no model; an evaluation has another model.
    """
    if not _REPOSITORY.fullmatch(repository) or ".." in repository or "--" in repository:
        raise RunError(f"repository: expected ORG/NAME, found {quote(repository)}")
    folder, training, runs = _published(Path(run))
    if is_exported(folder):
        check_exported(folder)
    digests = fingerprint(folder)
    for path in evaluations:
        evaluation = read_finished(path)
        if evaluation.record["inputs"].get("model", {}).get("files") != digests:
            raise RunError(f"{path}: evaluates another model than {run}: the digests of the files differ")
        runs.append(evaluation)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != CARD]
    if not any(path.name == "config.json" for path in files):
        raise no_model(folder)
    card = model_card(repository, training=training, evaluations=runs)
    return Upload(repository, files, card, eval_results(runs, task_id=task_id))


def eval_results(evaluations: Sequence[FinishedRun], *, task_id: str) -> str:
    """Return the evaluations on exactly one whole data set of the hub, in the hub's format of evaluation results.

    https://huggingface.co/docs/hub/eval-results: the hub shows them with the model, and on the leaderboard of the data
    set if it is a benchmark. The value is the benchmark's own score if the run has one, else the accuracy.
    """
    entries = []
    for run in evaluations:
        inputs, summary = run.record["inputs"], run.summary
        data = inputs.get("data") or {}
        sources = data.get("sources") or []
        whole = not data.get("subset") and inputs.get("limit") is None and not inputs.get("hints")
        if (
            not whole
            or [source.get("kind") for source in sources] != ["hub"]
            or summary.get("accuracy") is None
        ):
            continue
        scores = [benchmark["score"] for benchmark in (summary.get("benchmarks") or {}).values()]
        of_benchmark = len(scores) == 1 and scores[0] is not None
        view = ", ".join(f"{name} {inputs.get(name)}" for name in ("protocol", "profile_posts"))
        entries.append(
            {
                "dataset": {"id": sources[0]["repository"], "task_id": task_id},
                "value": scores[0] if of_benchmark else summary["accuracy"],
                "date": (run.record.get("sessions") or [{}])[-1].get("started"),
                "notes": f"{'score of the benchmark' if of_benchmark else 'accuracy'} by prb_jax {__version__}, "
                f"split {sources[0].get('split')}, n {summary['n']}, {view}",
            }
        )
    return json.dumps(entries, indent=2) + "\n" if entries else ""  # JSON is YAML


def _published(path: Path) -> tuple[Path, TrainingRun | None, list[FinishedRun]]:
    """Return the model folder that a run names, its training run, and its evaluations."""
    if path.is_file():
        raise RunError(f"{path}: expected the folder of a run, found a file; data are not pushed")
    if (path / TRAIN).is_file():
        TRAINING.read(path)  # raises for policies, which cannot be pushed
        run = read_training(path)
        if run.summary is None or not (path / MODEL).is_dir():
            raise RunError(f"{path}: the training run is not finished, so there is no model in it yet")
        return path / MODEL, run, []
    if not (path / RUN).is_file():
        raise RunError(
            f"{path}: expected the folder of a run, found no {TRAIN} and no {RUN}; data are not pushed"
        )
    run = read_finished(path)
    name, recorded = str(run.record.get("model")), run.record["inputs"].get("model", {})
    if not isinstance(recorded.get("files"), dict):
        raise RunError(
            f"{path}: the run scored {name}, which has no files of a model: there is nothing to push"
        )
    if recorded.get("revision") is not None:
        raise RunError(f"{path}: the run scored {name} of the hub: its model is there already")
    place = Path(localised(name)).expanduser()
    if not place.is_dir():
        raise RunError(f"{path}: the run scored {name}, and there is no such folder now")
    folder = locate(name).path
    if fingerprint(folder) != recorded["files"]:
        raise RunError(f"{path}: the model {name} has changed since the run scored it")
    return folder, _training_of(place), [run]


def _training_of(folder: Path) -> TrainingRun | None:
    """Return the training run in a model folder or its parent."""
    for place in (folder, folder.parent):
        if (place / TRAIN).is_file() and (place / SUMMARY).is_file() and TRAINING.read(place) is not None:
            return read_training(place)
    return None


def _reason(error: Exception) -> str:
    """Return the first informative line of an error, or a hint if the login is missing."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"no right to write there (status {status}): `hf auth login`, or set HF_TOKEN"
    return first_line(error)


def model_card(repository: str, *, training: TrainingRun | None, evaluations: Sequence[FinishedRun]) -> str:
    """Return the card of a repository in Markdown, with the header that the hub reads: a table for each evaluation, and
    the training if the model was trained here."""
    header = {
        "library_name": "prb_jax",
        "pipeline_tag": "text-classification",
        "tags": ["reward-model", "personalization", "prb_jax"],
    }
    if training is not None:
        name, model = training.record.get("model"), training.record["inputs"].get("model")
        on_hub = isinstance(model, dict) and model.get("revision") is not None  # a hub id has a revision
        if on_hub and isinstance(name, str) and _REPOSITORY.fullmatch(name):
            header["base_model"] = name
    parts = [
        "---",
        # JSON is YAML, quoted throughout
        *(f"{name}: {json.dumps(value)}" for name, value in header.items()),
        "---",
        "",
        f"# {_inline(repository.partition('/')[2])}",
        "",
        f"A reward model, published from a run of `prb_jax` {__version__}.",
    ]
    for run in evaluations:
        parts += ["", *_evaluation(run)]
    if training is not None:
        parts += ["", *_training(training)]
    use = """
## Use

    import prb_jax as prb
    rm = prb.load("{}")
    rm.reward("Tea or coffee?", "Coffee.", profile=[{{"id": "1", "text": "Coffee keeps me awake."}}])
"""
    return "\n".join([*parts, use.format(repository)])


def _evaluation(run: FinishedRun) -> Iterator[str]:
    summary, inputs = run.summary, run.record["inputs"]
    names = [str(name) for name in run.record.get("data") or ["comparisons given from Python"]]
    definition = (summary.get("definitions") or {}).get("ci95", "see summary.json")
    yield f"## Evaluation on {_inline(', '.join(names))}"
    yield ""
    yield from headline(scorers(summary, name="this model")).markdown(_inline)
    yield ""
    yield f"[..] 95 % interval: {_inline(definition)}. A tie is not a win."
    yield ""
    for gain in gains(summary.get("controls") or {}):
        yield f"- {_inline(gain)}"
    yield f"- data: {_inline(_sources(inputs.get('data')))}"
    view = ", ".join(f"{name} {inputs.get(name)}" for name in ("protocol", "profile_posts", "max_length"))
    yield f"- shown to the model: {_inline(view)}"
    if told := told_of(inputs.get("hints") or {}):
        yield f"- told in addition to the profile: {_inline(told)}"
    if (quantized := inputs.get("model", {}).get("quantize")) is not None:
        yield f"- weights quantised for this evaluation: {_inline(str(quantized))}"
    if inputs.get("limit") is not None:
        yield f"- **testing only**: the first {inputs['limit']} comparisons of each source"
    if limited := summary.get("truncated"):
        yield f"- text cut in {limited:,} of {summary['n']:,} comparisons"
    yield from _command(run.record)


def _training(run: TrainingRun) -> Iterator[str]:
    inputs = run.record["inputs"]
    settings = {**inputs.get("settings", {}), **(run.record.get("sessions") or [{}])[-1].get("settings", {})}
    yield "## Training"
    yield ""
    yield from last_figures(run.summary or {}).markdown(_inline)
    yield ""
    yield f"- data: {_inline(str(settings.get('data')))}, {inputs.get('data', {}).get('train', 0):,} comparisons"
    yield f"- starting model: {_inline(str(settings.get('model')))}"
    chosen = (
        f"{name}={settings[name]}" for name in ("method", "tuning", "steps", "seed") if name in settings
    )
    yield f"- settings: {_inline(', '.join(chosen))}"
    yield from _command(run.record)


def _command(record: Mapping[str, Any]) -> Iterator[str]:
    command = record.get("command")
    if isinstance(command, list) and command:
        line = visible(shlex.join(map(str, command))).replace("\n", " ")
        yield from ("", "The command that repeats it:", "", f"    {line}")


def _sources(data: Any) -> str:
    """Return the files of the data with the first characters of their digests."""
    if not isinstance(data, Mapping):
        return "not recorded"
    sources = []
    for source in data.get("sources") or []:
        files = [f"{name} ({digest[:19]})" for name, digest in (source.get("files") or {}).items()]
        more = [f"and {len(files) - 10} more files"] if files[10:] else []
        named = [str(source[key]) for key in ("repository", "name", "part") if source.get(key)]
        sources.append(", ".join([*files[:10], *more, *named]))
    subset = f"; subset {data['subset']}" if data.get("subset") else ""
    return f"{'; '.join(sources) or data.get('sha256')}{subset}; {data.get('comparisons', 0):,} comparisons"


def _inline(text: str) -> str:
    """Return text for the middle of a Markdown line, with all markup escaped."""
    text = visible(text).replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|#" else letter for letter in text)
