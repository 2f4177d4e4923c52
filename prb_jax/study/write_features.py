"""`prb features`: write the feature store of a data set, file by file; a killed command resumes at the next file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from prb_jax.errors import RunError
from prb_jax.personal.embedder import Advance, Embedded, Embedder, RewardEmbedder
from prb_jax.personal.feature_options import FeatureOptions
from prb_jax.personal.features import (
    FEATURE_RUNS,
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
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Items
from prb_jax.records.writing import whole_file, writing
from prb_jax.runs.kind import as_recorded
from prb_jax.runs.parts import Part, finish_part, parse_part
from prb_jax.runs.progress import Count, show_progress
from prb_jax.scoring.inputs import Data, Inputs, read_inputs
from prb_jax.scoring.unchanged import check_unchanged
from prb_jax.study.embedder import open_embedder
from prb_jax.version import computing_versions


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

    The same call resumes a killed one, and gives the same bytes. A finished folder is only opened.

    Args:
      model: Folder or hub id of a reward model, a causal language model or an encoder of texts; or the result of
        :func:`prb_jax.study.embedder.open_embedder`.
      data: Data, as for :func:`prb_jax.evaluate`.
      out: Folder of the store.
      options: Options for computing features.
      subset, limit: Same as for :func:`prb_jax.evaluate`.
      progress: Show progress on standard error.

    Raises:
      PrbError: model, data or folder cannot be used, or the folder contains other features: names the field.
    """
    write_feature_part(
        model, data, out=out, part=None, options=options, subset=subset, limit=limit, progress=progress
    )
    return open_features(out)


def write_feature_part(
    model: str | Path | Embedder,
    data: Data | Inputs,
    *,
    out: str | Path,
    part: str | None,
    options: FeatureOptions | None = None,
    subset: str | None = None,
    limit: int | None = None,
    progress: bool = True,
) -> None:
    """Write the part "I/N" of the feature files, as one of N jobs; :func:`prb_jax.merge` combines the parts.

    Without a part all files are written. Other arguments and errors are the same as for :func:`write_features`, which
    finishes the merged folder.
    """
    folder, chosen = FEATURE_RUNS.check(out), options or FeatureOptions()
    job = None if part is None else parse_part(part)
    inputs = data if isinstance(data, Inputs) else read_inputs(data, subset=subset, limit=limit)
    embedder = (
        open_embedder(model, chosen.loading, view=chosen.view, responses_alone=chosen.responses_alone)
        if isinstance(model, str | Path)
        else model
    )
    if chosen.profile_posts and not embedder.gives_rewards:
        raise RunError(
            f"profile_posts: {embedder.name} gives no reward, because it is not a reward model; remove it"
        )
    decided = {
        "model": embedder.identity(),
        "data": inputs.to_json(),
        "limit": limit,
        "store": chosen.store,
        "file_rows": chosen.file_rows,
        **({"profile_posts": chosen.profile_posts} if chosen.profile_posts else {}),
        **({} if job is None else {"part": str(job)}),
        "versions": computing_versions(plain=False),
    }
    notes = {"model": embedder.name, "data": list(inputs.sources)}
    with FEATURE_RUNS.open(folder, decided, notes=notes, session={}):
        if (folder / FEATURES).is_file():
            return
        texts = _distinct(inputs.comparisons, profile_posts=chosen.profile_posts)
        files, count, truncated = _write_files(embedder, texts, folder, chosen, job, progress=progress)
        if job is not None:
            check_unchanged(inputs)
            finish_part(folder, job, rows=len(files), rows_of_all=count, files=files)
            return
        for name, rows in texts.items():
            path = folder / f"{name}.keys.npy"
            if rows or name in TABLES:
                keys = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, KEY_BYTES)
                with writing(path), whole_file(path) as file:
                    np.save(file, keys, allow_pickle=False)
        check_unchanged(inputs)
        facts = {
            "kind": KIND,
            "format": FORMAT,
            "model": str(Path(embedder.name).resolve()) if Path(embedder.name).is_dir() else embedder.name,
            "opened_with": {
                **{name: str(value) for name, value in chosen.loading.given.items() if name != "mesh"},
                **{name: value for name, value in asdict(chosen.view).items() if value is not None},
                "responses_alone": chosen.responses_alone,
            },
            "width": embedder.width,
            "dtype": chosen.store,
            "part": chosen.file_rows,
            **{name: len(rows) for name, rows in texts.items()},
            REWARDS: embedder.gives_rewards,
            "profile_posts": chosen.profile_posts,
            "truncated": truncated,
            "inputs": as_recorded(decided),
        }
        FEATURE_RUNS.finish(folder, facts)
        for cut in folder.glob(".*.cut"):
            with writing(cut):
                cut.unlink(missing_ok=True)


def blank_features(comparisons: Items[Comparison]) -> FeatureStore:
    """Return a store of features of width 0, to read choices without a model."""
    texts = _distinct(comparisons, profile_posts=0)
    answers, posts = (
        FeatureTable(
            [np.zeros((len(texts[name]), 0), np.float32)], {key: row for row, key in enumerate(texts[name])}
        )
        for name in TABLES
    )
    return FeatureStore(Path(), {"profile_posts": 0}, answers, posts)


def _write_files(
    embedder: Embedder,
    texts: Mapping[str, Mapping[bytes, Any]],
    folder: Path,
    options: FeatureOptions,
    part: Part | None,
    *,
    progress: bool,
) -> tuple[list[str], int, dict[str, int]]:
    """Write the missing files; return the names of the part's files, the number of files of all parts, and the number
    of cut texts of each table."""

    def shown(comparisons: Sequence[Comparison], *, advance: Advance) -> Embedded:
        source = cast(RewardEmbedder, embedder)
        rewards, cut = source.shown(comparisons, profile_posts=options.profile_posts, advance=advance)
        return Embedded(rewards[:, None], cut)

    compute: dict[str, Callable[..., Embedded]] = {
        "answers": embedder.answers, "posts": embedder.posts, SHOWN: shown,
    }  # fmt: skip
    files, total, truncated = list[str](), 0, dict.fromkeys(texts, 0)
    turns = itertools.count()  # numbers the files, which are dealt to the parts in turn
    count = Count(sum(map(len, texts.values())), unit="texts")
    with show_progress(f"features of {embedder.name}", count, enabled=progress) as display:
        for name, of_table in texts.items():
            rows = list(of_table.values())
            for number, start in enumerate(range(0, len(rows), options.file_rows)):
                here = rows[start : start + options.file_rows]
                paths = [folder / part_name(name, number), folder / f".{name}-{number:06}.cut"]
                if name == "answers" and embedder.gives_rewards:
                    paths.append(folder / part_name(REWARDS, number))
                total += len(paths)
                if part is not None and next(turns) % part.count != part.number - 1:
                    display.advance(len(here))
                    continue
                files += [path.name for path in paths]
                if all(path.exists() for path in paths):
                    display.advance(len(here))
                else:
                    embedded = compute[name](here, advance=display.advance)
                    numbers = [embedded.features, *([] if embedded.rewards is None else [embedded.rewards])]
                    if not all(np.isfinite(values).all() for values in numbers):
                        raise RunError(
                            f"{embedder.name}: a feature is not a finite number (float16 and broken weights overflow; "
                            "try --dtype float32)"
                        )
                    _write_file(embedded, *paths, dtype="float32" if name == SHOWN else options.store)
                truncated[name] += int(paths[1].read_text())
    return files, total, truncated


def _write_file(
    embedded: Embedded, path: Path, cut: Path, rewards: Path | None = None, *, dtype: str
) -> None:
    with writing(path):
        with whole_file(cut) as file:
            file.write(str(embedded.truncated).encode())
        if rewards is not None:
            with whole_file(rewards) as file:
                np.save(file, np.asarray(embedded.rewards, np.float32)[:, None], allow_pickle=False)
        with whole_file(path) as file:
            np.save(file, as_stored(embedded.features, dtype), allow_pickle=False)


def _distinct(comparisons: Items[Comparison], *, profile_posts: int) -> dict[str, dict[bytes, Any]]:
    """Return the texts of each table by key, in row order. Answers are comparisons of one response, grouped by prompt
    so a model reads each prompt once; posts are texts."""
    answers, shown, posts = dict[bytes, Comparison](), dict[bytes, Comparison](), dict[bytes, str]()
    seen: set[int] = set()
    prompts: dict[Any, int] = {}
    for one in comparisons:
        prompts.setdefault(one.prompt, len(prompts))
        profile = one.profile[:profile_posts]
        for text in one.responses:
            if (key := answer_key(one.prompt, text)) not in answers:  # keep the first one
                answers[key] = Comparison(id=one.id, prompt=one.prompt, responses=[text])
            if profile_posts and (key := shown_key(profile, one.prompt, text)) not in shown:
                name = f"response {len(shown)} with a profile"
                shown[key] = Comparison(id=name, prompt=one.prompt, responses=[text], profile=profile)
        # Ids are only unique among objects in memory: freed objects can reuse them.
        if not comparisons.in_memory or id(one.profile) not in seen:
            seen.add(id(one.profile))
            for post in one.profile:
                text = read_post(post).text
                posts.setdefault(post_key(text), text)
    ordered = sorted(answers.items(), key=lambda item: prompts[item[1].prompt])  # stable
    return {"answers": dict(ordered), "posts": posts, SHOWN: shown}
