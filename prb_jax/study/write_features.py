"""`prb features`: write the feature store of a data set, file by file; a killed command goes on with the next file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.data.reading import read_object
from prb_jax.data.writing import whole_file, write_json, writing
from prb_jax.errors import RunError
from prb_jax.personal.embedder import Advance, Embedded, Embedder, RewardEmbedder
from prb_jax.personal.features import (
    FEATURES,
    FORMAT,
    KEY_BYTES,
    KIND,
    REWARDS,
    SHOWN,
    TABLES,
    FeatureStore,
    FeatureTable,
    answer_key,
    as_stored,
    open_features,
    part_name,
    post_key,
    read_post,
    shown_key,
)
from prb_jax.runs.kind import RUN, RunKind, as_recorded
from prb_jax.runs.parts import Part, finish_part, parse_part
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.inputs import Data, Inputs, check_unchanged, read_inputs
from prb_jax.scoring.run import computing_versions
from prb_jax.study.embedder import open_embedder
from prb_jax.study.feature_options import FeatureOptions

RUNS: Final = RunKind(KIND, "prb features", finished=FEATURES)


@dataclass(frozen=True)
class _Texts:
    """The distinct texts of a data set, in the order in which they occur first."""

    answers: Sequence[Comparison]
    posts: Sequence[str]
    shown: Sequence[Comparison]
    keys: Mapping[str, np.ndarray]


def write_features(
    model: str | Path | Embedder,
    data: Data | Inputs,
    *,
    out: str | Path,
    options: FeatureOptions | None = None,
    subset: str | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> FeatureStore:
    """Write the features of every distinct response and post of a data set.

    The same call continues one that was killed, and gives the same bytes. A finished folder is only opened.

    Args:
      model: a folder or hub id of a reward model, a causal language model or an encoder of texts; or what
        :func:`prb_jax.study.embedder.open_embedder` gives.
      data: what :func:`prb_jax.evaluate` takes.
      out: the folder of the store.
      options: how features are made.
      subset, limit: as of :func:`prb_jax.evaluate`.
      progress: shows progress on standard error.

    Raises:
      PrbError: model, data or folder cannot be used, or the folder holds other features: the field is named.
    """
    _write(model, data, Path(out), options or FeatureOptions(), None, subset, limit, progress)
    return open_features(out)


def write_feature_part(
    model: str | Path | Embedder,
    data: Data | Inputs,
    *,
    out: str | Path,
    part: str,
    options: FeatureOptions | None = None,
    subset: str | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> None:
    """Write the part "I/N" of the files of features, as one of N jobs; :func:`prb_jax.merge` puts them together.

    Other arguments and errors are those of :func:`write_features`, which finishes the merged folder.
    """
    _write(model, data, Path(out), options or FeatureOptions(), parse_part(part), subset, limit, progress)


def _write(
    model: str | Path | Embedder,
    data: Data | Inputs,
    folder: Path,
    chosen: FeatureOptions,
    part: Part | None,
    subset: str | None,
    limit: int | None,
    progress: bool,
) -> None:
    RUNS.check(folder)
    inputs = data if isinstance(data, Inputs) else read_inputs(data, subset=subset, limit=limit)
    embedder = (
        open_embedder(model, chosen.loading, view=chosen.view, responses_alone=chosen.responses_alone)
        if isinstance(model, str | Path)
        else model
    )
    if chosen.profile_posts and not embedder.gives_rewards:
        raise RunError(
            f"profile_posts: {embedder.name} gives no reward, which a reward model alone does; leave it out"
        )
    decided = {
        "model": embedder.identity(),
        "data": inputs.to_json(),
        "limit": limit,
        "store": chosen.store,
        "file_rows": chosen.file_rows,
        **({"profile_posts": chosen.profile_posts} if chosen.profile_posts else {}),
        **({} if part is None else {"part": str(part)}),
        "versions": computing_versions(plain=False),
    }
    notes = {"model": embedder.name, "data": list(inputs.sources)}
    with RUNS.open(folder, decided, notes=notes, session={}):
        if not (folder / FEATURES).is_file():
            _write_tables(embedder, inputs, folder, chosen, as_recorded(decided), part, progress=progress)


def blank_features(comparisons: Sequence[Comparison]) -> FeatureStore:
    """Return a store of features of width 0: who chose what can be read without a model."""
    keys = _distinct(comparisons, profile_posts=0).keys
    answers, posts = (
        FeatureTable(
            [np.zeros((len(keys[name]), 0), np.float32)],
            [0],
            {key.tobytes(): row for row, key in enumerate(keys[name])},
        )
        for name in TABLES
    )
    return FeatureStore(Path(), {"profile_posts": 0}, answers, posts)


def is_of_features(folder: Path) -> bool:
    """Return whether a folder was begun by `prb features`, finished or not."""
    record = read_object(folder / RUN, error=RunError) if (folder / RUN).is_file() else {}
    return record.get("kind") == KIND


def _write_tables(
    embedder: Embedder,
    inputs: Inputs,
    folder: Path,
    options: FeatureOptions,
    decided: Mapping[str, Any],
    part: Part | None,
    *,
    progress: bool,
) -> None:
    texts = _distinct(inputs.comparisons, profile_posts=options.profile_posts)
    truncated = {"answers": 0, "posts": 0, SHOWN: 0}
    own_rewards = embedder.gives_rewards
    numbers = itertools.count()  # of the files of features, which fall to the parts by turns
    written: list[str] = []
    count = Count(len(texts.answers) + len(texts.posts) + len(texts.shown), unit="texts")
    with show_progress(f"features of {embedder.name}", count, enabled=progress) as display:

        def write(
            name: str, items: Sequence[Any], compute: Callable[[Sequence[Any], Advance], Embedded]
        ) -> None:
            for number, start in enumerate(range(0, len(items), options.file_rows)):
                texts_of_file = items[start : start + options.file_rows]
                if part is not None and next(numbers) % part.count != part.number - 1:
                    display.advance(len(texts_of_file))
                    continue
                path, cut = folder / part_name(name, number), folder / f".{name}-{number:06}.cut"
                rewards = folder / part_name(REWARDS, number) if name == "answers" and own_rewards else None
                written.extend(file.name for file in (path, cut, rewards) if file is not None)
                if path.exists() and cut.exists() and (rewards is None or rewards.exists()):
                    truncated[name] += int(cut.read_text())
                    display.advance(len(texts_of_file))
                    continue
                found = compute(texts_of_file, display.advance)
                if not (np.isfinite(found.features).all() and _finite(found.rewards)):
                    raise RunError(
                        f"{embedder.name}: a feature is not a finite number (float16 and broken weights overflow; try "
                        "--dtype float32)"
                    )
                with writing(path):
                    with whole_file(cut) as file:
                        file.write(str(found.truncated).encode())
                    if rewards is not None:
                        assert found.rewards is not None
                        with whole_file(rewards) as file:
                            np.save(file, found.rewards[:, None].astype(np.float32), allow_pickle=False)
                    with whole_file(path) as file:
                        stored = "float32" if name == SHOWN else options.store
                        np.save(file, as_stored(found.features, stored), allow_pickle=False)
                truncated[name] += found.truncated

        write("answers", texts.answers, lambda answers, advance: embedder.answers(answers, advance=advance))
        write("posts", texts.posts, lambda posts, advance: embedder.posts(posts, advance=advance))

        def with_profile(shown: Sequence[Comparison], advance: Advance) -> Embedded:
            rewards, cut = cast(RewardEmbedder, embedder).shown(
                shown, profile_posts=options.profile_posts, advance=advance
            )
            return Embedded(rewards[:, None], cut)

        write(SHOWN, texts.shown, with_profile)
    if part is not None:
        check_unchanged(inputs)
        finish_part(folder, part, rows=len(written), files=written)
        return
    for name, keys in texts.keys.items():
        path = folder / f"{name}.keys.npy"
        with writing(path), whole_file(path) as file:
            np.save(file, keys, allow_pickle=False)
    check_unchanged(inputs)
    facts = {
        "kind": KIND,
        "format": FORMAT,
        "model": str(Path(embedder.name).resolve()) if Path(embedder.name).is_dir() else embedder.name,
        "opened_with": {
            **{name: str(value) for name, value in options.loading.given.items() if name != "mesh"},
            **{name: value for name, value in asdict(options.view).items() if value is not None},
            "responses_alone": options.responses_alone,
        },
        "width": embedder.width,
        "dtype": options.store,
        "part": options.file_rows,
        "answers": len(texts.answers),
        "posts": len(texts.posts),
        REWARDS: own_rewards,
        SHOWN: len(texts.shown),
        "profile_posts": options.profile_posts,
        "truncated": truncated,
        "inputs": dict(decided),
    }
    write_json(folder / FEATURES, facts)
    for cut in folder.glob(".*.cut"):
        with writing(cut):
            cut.unlink(missing_ok=True)


def _finite(values: np.ndarray | None) -> bool:
    return values is None or bool(np.isfinite(values).all())


def _distinct(comparisons: Sequence[Comparison], *, profile_posts: int) -> _Texts:
    """Each response with its prompt as a comparison of its own, and each post, once; equal answers of one prompt stand
    beside each other, so that a model reads the prompt once. So do the responses that are shown with a profile."""
    shown: dict[bytes, Comparison] = {}
    answers: dict[bytes, tuple[Any, str, str]] = {}
    posts: dict[bytes, str] = {}
    seen: set[int] = set()
    kept = isinstance(comparisons, list)  # others are read anew each time, and numbers of objects come again
    prompts: dict[Any, int] = {}
    for comparison in comparisons:
        prompts.setdefault(comparison.prompt, len(prompts))
        for text in comparison.responses:
            answers.setdefault(answer_key(comparison.prompt, text), (comparison.prompt, text, comparison.id))
        if profile_posts:
            posts_shown = comparison.profile[:profile_posts]
            for text in comparison.responses:
                key = shown_key(posts_shown, comparison.prompt, text)
                if key not in shown:
                    name = f"response {len(shown)} with a profile"
                    shown[key] = Comparison(
                        id=name, prompt=comparison.prompt, responses=[text], profile=posts_shown
                    )
        if not kept or id(comparison.profile) not in seen:
            seen.add(id(comparison.profile))
            for post in comparison.profile:
                text = read_post(post).text
                posts.setdefault(post_key(text), text)
    ordered = sorted(answers.items(), key=lambda item: prompts[item[1][0]])  # stable
    return _Texts(
        answers=[
            Comparison(id=name, prompt=prompt, responses=[text])  # of the first comparison that has it
            for _, (prompt, text, name) in ordered
        ],
        posts=list(posts.values()),
        shown=list(shown.values()),
        keys={
            "answers": _as_array([key for key, _ in ordered]),
            "posts": _as_array(list(posts)),
            **({SHOWN: _as_array(list(shown))} if shown else {}),
        },
    )


def _as_array(keys: Sequence[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)
