"""`prb past-texts`: preference pairs from texts that people wrote themselves, in the style of LaMP.

This is a proxy: the person's own text is preferred, and the other text is written by somebody else for the most similar
input, or by a policy. Nobody judges the pairs, so a model may learn "looks human" from the policy's texts. Therefore
the subset of each pair names its source, and accuracies are reported by source.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prb_jax.behaviour.generation.sample import read_samples
from prb_jax.errors import DataError, RunError, quote
from prb_jax.records.reading import read_json
from prb_jax.records.writing import write_once
from prb_jax.study.retrieval.rank_profiles import Query, bm25

OTHER_USER: Final = "other_user"
POLICY: Final = "policy"

_PAIRS: Final = (("text", "title"), ("abstract", "title"), ("text", None), ("input", "output"))
"""Input and output fields of a past pair: headlines, titles of papers, tweets (only an output), and others."""


@dataclass(frozen=True)
class PastTexts:
    """The result of `past_texts`."""

    path: Path  # the file
    counts: dict[str, int]  # pairs by source
    users: int  # number of users
    without: dict[str, int]  # inputs without a pair, by source


def past_texts(
    inputs: str | Path, outputs: str | Path, *, out: str | Path, samples: Sequence[str | Path] = ()
) -> PastTexts:
    """Write pairs (the person's own text, another text) with the person's past pairs as profile.

    Args:
      inputs: File in the format of LaMP's ``*_questions.json``: a list of {id, input, profile}, plus ``user_id`` if the
        id is not the user's. A past pair of a profile is {text, title}, {abstract, title}, {input, output}, or {text}.
      outputs: File in the format of LaMP's ``*_outputs.json``: {golds: [{id, output}]}, the person's own texts.
      out: A ``.jsonl`` file. A file with different contents is never replaced.
      samples: Runs of `prb sample` on the file that this function writes without them. Their first samples become
        additional pairs, with the source "policy".

    Raises:
      DataError: a file has the wrong format; names the field.
      RunError: ``out`` has other contents or cannot be written, or a run is not finished.
    """
    target = Path(out)
    if target.suffix != ".jsonl":
        raise RunError(f"{target}: expected a name that ends in .jsonl")
    items = _items(Path(inputs), Path(outputs))
    users = {item["user_id"] for item in items}
    if len(users) < 2:
        raise DataError(f"{inputs}: expected two users or more, found {len(users)}")
    negatives = {OTHER_USER: _of_other_users(items)}
    for folder in samples:
        negatives[POLICY] = negatives.get(POLICY, {}) | _of_policy(Path(folder), items)
    counts, without = dict.fromkeys(negatives, 0), dict.fromkeys(negatives, 0)
    lines = []
    for item in items:
        for source, texts in negatives.items():
            if item["id"] not in texts:
                without[source] += 1
                continue
            counts[source] += 1
            row = {
                "id": f"{item['id']}:{source}",
                "user_id": item["user_id"],
                "subset": source,
                "question": item["input"],
                "chosen": item["output"],
                "rejected": texts[item["id"]],
                "profile": item["profile"],
            }
            lines.append(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    write_once({target: b"".join(lines)})
    return PastTexts(target, counts, len(users), {name: count for name, count in without.items() if count})


def _items(inputs: Path, outputs: Path) -> list[dict[str, Any]]:
    read, golds = read_json(inputs, error=DataError), read_json(outputs, error=DataError)
    if not isinstance(read, list) or not read:
        raise DataError(f"{inputs}: expected a list of {{id, input, profile}}, found {quote(read)}")
    if not isinstance(golds, dict) or not isinstance(golds.get("golds"), list):
        raise DataError(f"{outputs}: expected {{golds: [{{id, output}}]}}, found {quote(golds)}")
    texts: dict[str, str] = {}
    for number, gold in enumerate(golds["golds"]):
        where = f"{outputs}: golds[{number}]"
        texts[_text(gold, "id", where)] = _text(gold, "output", where)
    items, seen = [], set[str]()
    for number, one in enumerate(read):
        where = f"{inputs}: [{number}]"
        name = _text(one, "id", where)
        if name in seen:
            raise DataError(f"{where}: a second input with the id {quote(name)}")
        if name not in texts:
            raise DataError(f"{where}: {outputs} has no output of {quote(name)}")
        if not isinstance(one.get("profile"), list):
            raise DataError(f"{where}: field 'profile': expected a list, found {quote(one.get('profile'))}")
        seen.add(name)
        past = enumerate(one["profile"])
        item = {
            "id": name,
            "user_id": _text(one, "user_id", where) if "user_id" in one else name,
            "input": _text(one, "input", where),
            "output": texts[name],
            "profile": [_past(pair, f"{where}.profile[{place}]", place) for place, pair in past],
        }
        items.append(item)
    return items


def _text(value: Any, key: str, where: str) -> str:
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: field '{key}': expected a text, found {quote(text)}")
    return text


def _past(pair: Any, where: str, place: int) -> dict[str, str]:
    for given, written in _PAIRS:
        if isinstance(pair, dict) and given in pair and (written is None or written in pair):
            parts = [_text(pair, key, where) for key in (given, written) if key]
            return {"id": str(pair.get("id", place)), "category": "", "text": "\n".join(parts)}
    expected = " or ".join("{" + ", ".join(key for key in keys if key) + "}" for keys in _PAIRS)
    raise DataError(f"{where}: expected {expected}, found {quote(pair)}")


def _of_other_users(items: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Another user's text for the most similar input by BM25, for each input; never an identical text."""
    posts = [{"text": item["input"]} for item in items]
    orders = bm25(Query(item["id"], item["input"], posts) for item in items)
    texts: dict[str, str] = {}
    for item, order in zip(items, orders, strict=True):
        for other in (items[place] for place in order):
            if other["user_id"] != item["user_id"] and other["output"].strip() != item["output"].strip():
                texts[item["id"]] = other["output"]
                break
    return texts


def _of_policy(folder: Path, items: Sequence[dict[str, Any]]) -> dict[str, str]:
    """First sample of each input that is neither empty nor the person's own text."""
    outputs = {item["id"]: item["output"].strip() for item in items}
    texts: dict[str, str] = {}
    for (sampled, _), row in read_samples(folder).items():
        name = sampled.removesuffix(f":{OTHER_USER}")
        if name not in outputs:
            raise DataError(f"{folder}: expected samples of the inputs here, found one of {quote(sampled)}")
        if row["text"].strip() not in ("", outputs[name]):
            texts.setdefault(name, row["text"])
    return texts
