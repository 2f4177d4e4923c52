"""RMGAP (github.com/nanzhi84/RMGAP): four responses in different styles, and prompts that ask for one of them.

Each instance has four groups of three paraphrased prompts, and each group one right response. There are no users: the
prompt contains the wish.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from prb_jax.errors import DataError, quote
from prb_jax.metrics.rows import ScoredRow
from prb_jax.records import fields
from prb_jax.records.benchmarks.benchmark import (
    Benchmark,
    BenchmarkScore,
    Published,
    by_subset,
    check_finite,
    mean,
)

DOMAINS: Final = ("Chat", "Writing", "Reasoning", "Safety")
_RESPONSES, _GROUPS, _PROMPTS = 4, 4, 3


def records(published: Published) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a comparison for each prompt, responses in the order of their keys; its id is "INSTANCE/GROUP/PROMPT"."""
    for place, row in published.rows:
        where = place.where
        name = fields.identifier(row.get("id"), where, "id")
        domain = fields.text(row.get("domain"), where, "domain")
        if domain not in DOMAINS:
            fields.fail(where, "domain", f"expected one of {', '.join(DOMAINS)}, found {quote(domain)}")
        texts: dict[str, str] = {}
        for number, response in enumerate(_several(row.get("responses"), _RESPONSES, where, "responses")):
            key = fields.identifier(response.get("key"), where, f"responses[{number}].key")
            if key in texts:
                fields.fail(where, f"responses[{number}].key", f"{quote(key)} is given twice")
            texts[key] = fields.text(response.get("text"), where, f"responses[{number}].text")
        keys = sorted(texts)
        for number, group in enumerate(_several(row.get("prompt_groups"), _GROUPS, where, "prompt_groups")):
            field = f"prompt_groups[{number}]"
            winner = fields.identifier(group.get("winner"), where, f"{field}.winner")
            if winner not in texts:
                expected = f"expected a key of responses ({', '.join(keys)})"
                fields.fail(where, f"{field}.winner", f"{expected}, found {quote(winner)}")
            for order, prompt in enumerate(
                _several(group.get("prompts"), _PROMPTS, where, f"{field}.prompts")
            ):
                yield (
                    where,
                    {
                        "id": f"{name}/{number}/{order}",
                        "question": fields.text(prompt.get("text"), where, f"{field}.prompts[{order}].text"),
                        "responses": [texts[key] for key in keys],
                        "labels": [float(key == winner) for key in keys],
                        "subset": domain,
                    },
                )


def _several(value: object, count: int, where: str, name: str) -> list[Mapping[str, Any]]:
    items = fields.sequence(value, where, name)
    if len(items) != count:
        fields.fail(where, name, f"expected {count}, found {len(items)}")
    return [fields.mapping(item, where, f"{name}[{number}]") for number, item in enumerate(items)]


def score(rows: Sequence[ScoredRow]) -> BenchmarkScore:
    """Return best of four as the mean of the four domains; by pair, and consistency, beside it.

    A group is consistent if its three prompts rank the responses alike; equal scores rank by key. Absent domains leave
    the score undefined.
    """
    domains = {name: _domain(members) for name, members in by_subset(rows).items()}
    missing = [name for name in DOMAINS if name not in domains]
    overall = {
        measure: None if missing else mean(domains[name][measure] for name in DOMAINS)
        for measure in ("best of 4", "pair", "consistency")
    }
    return BenchmarkScore(
        score=overall["best of 4"],
        figures={
            **overall,
            **{name: domains[name]["best of 4"] if name in domains else None for name in DOMAINS},
        },
        details={"domains": domains, "other_subsets": sorted(set(domains) - set(DOMAINS))},
        missing=missing,
    )


def _domain(rows: Sequence[ScoredRow]) -> dict[str, float]:
    pairs: list[bool] = []
    best: list[bool] = []
    rankings: dict[str, list[list[int]]] = {}
    for row in rows:
        check_finite(row)
        if len(row.scores) != _RESPONSES or sorted(row.labels) != [0.0] * (_RESPONSES - 1) + [1.0]:
            raise DataError(
                f"row {quote(row.id)}: expected {_RESPONSES} responses, one of them right, found labels "
                f"{list(row.labels)}"
            )
        right = row.scores[list(row.labels).index(1.0)]
        won = [right > value for value, label in zip(row.scores, row.labels, strict=True) if not label]
        pairs += won
        best.append(all(won))
        ranking = sorted(range(_RESPONSES), key=lambda k, scores=row.scores: (-scores[k], k))
        rankings.setdefault(row.id.rpartition("/")[0], []).append(ranking)
    same = [len(group) == _PROMPTS and all(one == group[0] for one in group) for group in rankings.values()]
    return {
        "prompts": len(rows),
        "best of 4": sum(best) / len(best),
        "pair": sum(pairs) / len(pairs),
        "consistency": sum(same) / len(same),
    }


def unit(row: ScoredRow) -> str:
    """Return the instance; its twelve prompts are drawn together."""
    return row.id.rsplit("/", 2)[0]


def copy(row: ScoredRow, number: int) -> ScoredRow:
    """Return the row of the n-th instance drawn."""
    return replace(row, id=f"{number}/{row.id}")


BENCHMARK = Benchmark(
    name="rmgap",
    rule="mean over Chat, Writing, Reasoning and Safety of best of four: the response that the prompt asks for scores "
    "strictly above the other three; also by pair, and the share of groups whose three prompts give one ranking",
    score=score,
    files="**/test.jsonl*",
    home="the folder data of github.com/nanzhi84/RMGAP",
    licence="MIT",
    columns=("prompt_groups",),
    records=records,
    unit=unit,
    copy=copy,
)
