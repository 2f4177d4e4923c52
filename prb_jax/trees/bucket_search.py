"""The search behind `choose_buckets`: dynamic programming, then a descent that betters its result.

Throughout, a bucket is its three sides (P, K, R), `cells` int [n, 3] are the distinct rounded tree
shapes in ascending order and `counts` int [n] the number of trees of each.

The dynamic programme splits the cells by K, each part by response length, each of those by prefix
length, always into runs of neighbouring values; for a given nesting it finds the best split. The
descent then moves one side of one bucket at a time, which also reaches shapes that are not nested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Sides = tuple[int, int, int]

# More levels than these change the cost by little and the search time by much.
MAX_K_LEVELS = 4
MAX_RESPONSE_LEVELS = 3
MAX_VALUES = 96
MAX_MOVES = 64
MAX_SWEEPS = 6


def cell_cost(
    prefix: np.ndarray | int, responses: int, response_length: int, *, attention_length: int
) -> np.ndarray:
    """Cost of one padded row, in tokens: its columns plus its attention.

    A query-key pair costs 1 / attention_length of what a token costs in the rest of the model, and
    there are P^2 / 2 + K R (P + R / 2) pairs.
    """
    p = np.asarray(prefix, np.float64)
    block = float(responses * response_length)
    pairs = p * p / 2 + block * (p + response_length / 2)
    return p + block + pairs / attention_length


@dataclass(frozen=True)
class Objective:
    """What buckets cost, in tokens of forward. The fields are those of `choose_buckets`."""

    tokens_per_batch: int
    divisor: int
    attention_length: int
    compile_cost_tokens: float

    def cell_cost(self, prefix: np.ndarray | int, responses: int, response_length: int) -> np.ndarray:
        """`cell_cost` with this attention length."""
        return cell_cost(prefix, responses, response_length, attention_length=self.attention_length)

    def most_rows(self, tokens: int) -> int:
        """The most rows of `tokens` columns in a batch."""
        return max(self.tokens_per_batch // tokens // self.divisor, 1) * self.divisor

    def deal(self, rows: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows of each batch, number of batches) when `rows` are dealt evenly into as few as possible."""
        most = np.maximum(self.tokens_per_batch // tokens // self.divisor, 1) * self.divisor
        batches = np.maximum(-(-rows // most), 1)
        return -(-rows // (batches * self.divisor)) * self.divisor, batches

    def padded_rows(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Rows computed for `rows` trees, whole batches counted."""
        batch, batches = self.deal(rows, tokens)
        return batch * batches

    def row_cost(self, cells: np.ndarray, top: Sides) -> np.ndarray:
        """[n] cost of a row of each cell in the bucket `top`; infinite where it does not fit."""
        return np.where((cells <= np.asarray(top)).all(axis=1), self.cell_cost(*top), np.inf)

    def row_costs(self, cells: np.ndarray, tops: Sequence[Sides]) -> np.ndarray:
        """[m, n] cost of a row of each cell in each bucket."""
        return np.stack([self.row_cost(cells, top) for top in tops])

    def total(self, costs: np.ndarray, counts: np.ndarray, tops: Sequence[Sides]) -> float:
        """Cost of the whole data when every tree goes to its cheapest bucket. `costs` from `row_costs`."""
        rows = np.bincount(costs.argmin(axis=0), weights=counts, minlength=len(tops)).astype(np.int64)
        tokens = np.asarray([p + k * r for p, k, r in tops])
        each = np.asarray([float(self.cell_cost(*top)) for top in tops])
        if not np.isfinite(costs.min(axis=0)).all():
            return float("inf")
        return float(
            (self.padded_rows(rows, tokens) * each).sum() + self.compile_cost_tokens * (rows > 0).sum()
        )


@dataclass(frozen=True)
class _Plans:
    """For m = 1, 2, ... buckets: the least cost without compiles (index m - 1), and the buckets."""

    cost: tuple[float, ...]
    tops: tuple[tuple[Sides, ...], ...]


def split_by_k(
    cells: np.ndarray, counts: np.ndarray, objective: Objective, max_buckets: int
) -> tuple[Sides, ...]:
    """The best nested split into at most `max_buckets` buckets."""
    best_cost, best = float("inf"), ()
    for levels in range(1, min(MAX_K_LEVELS, max_buckets) + 1):
        tops = _levels(cells[:, 1], counts, levels)
        if len(tops) < levels:
            break
        parts = [_between(cells[:, 1], low, top) for low, top in zip((0, *tops[:-1]), tops, strict=True)]
        plans = _join(
            [
                _split_by_response(cells[part], counts[part], top, objective, max_buckets)
                for part, top in zip(parts, tops, strict=True)
            ],
            max_buckets,
        )
        for m, (cost, chosen) in enumerate(zip(plans.cost, plans.tops, strict=True), start=1):
            if cost + m * objective.compile_cost_tokens < best_cost:
                best_cost, best = cost + m * objective.compile_cost_tokens, chosen
    return best


def refine(
    cells: np.ndarray, counts: np.ndarray, tops: Sequence[Sides], objective: Objective
) -> tuple[Sides, ...]:
    """Betters `tops` by moving one side of one bucket at a time, until no move lowers the cost."""
    current = sorted(set(tops))
    values = [_coarse(cells[:, side], counts, MAX_MOVES)[0] for side in range(3)]
    costs = objective.row_costs(cells, current)
    least = objective.total(costs, counts, current)
    for _ in range(MAX_SWEEPS):
        before = least
        for b in range(len(current)):
            for side in range(3):
                for value in values[side]:
                    sides = list(current[b])
                    sides[side] = int(value)
                    moved = (sides[0], sides[1], sides[2])
                    trial = [*current[:b], moved, *current[b + 1 :]]
                    trial_costs = costs.copy()
                    trial_costs[b] = objective.row_cost(cells, moved)
                    total = objective.total(trial_costs, counts, trial)
                    if total < least:
                        current, costs, least = trial, trial_costs, total
        if least == before:
            break
    return tuple(sorted(set(current)))


def _split_by_response(
    cells: np.ndarray, counts: np.ndarray, responses: int, objective: Objective, max_buckets: int
) -> _Plans:
    cost = [float("inf")] * max_buckets
    best: list[tuple[Sides, ...]] = [()] * max_buckets
    for levels in range(1, min(MAX_RESPONSE_LEVELS, max_buckets) + 1):
        tops = _levels(cells[:, 2], counts, levels)
        if len(tops) < levels:
            break
        parts = [_between(cells[:, 2], low, top) for low, top in zip((0, *tops[:-1]), tops, strict=True)]
        plans = _join(
            [
                _split_by_prefix(cells[part, 0], counts[part], responses, top, objective, max_buckets)
                for part, top in zip(parts, tops, strict=True)
            ],
            max_buckets,
        )
        for m in range(max_buckets):
            if plans.cost[m] < cost[m]:
                cost[m], best[m] = plans.cost[m], plans.tops[m]
    return _Plans(tuple(cost), tuple(best))


def _split_by_prefix(
    prefix: np.ndarray,
    counts: np.ndarray,
    responses: int,
    response_length: int,
    objective: Objective,
    max_buckets: int,
) -> _Plans:
    values, rows = _coarse(prefix, counts, MAX_VALUES)
    tokens = values + responses * response_length
    padded = objective.padded_rows(_run_rows(rows), np.broadcast_to(tokens, (len(values), len(values))))
    segment = _upper(padded * objective.cell_cost(values, responses, response_length))
    runs = _runs(segment, max_buckets)
    tops = [tuple((int(values[end]), responses, response_length) for end in ends) for _, ends in runs]
    missing = max_buckets - len(runs)
    return _Plans(tuple(cost for cost, _ in runs) + (float("inf"),) * missing, tuple(tops) + ((),) * missing)


def _join(plans: Sequence[_Plans], max_buckets: int) -> _Plans:
    """Shares m buckets among independent groups of rows, for every m, at least one for each."""
    cost, tops = list(plans[0].cost), list(plans[0].tops)
    for plan in plans[1:]:
        next_cost = [float("inf")] * max_buckets
        next_tops: list[tuple[Sides, ...]] = [()] * max_buckets
        for m in range(1, max_buckets):
            for own in range(m):
                total = cost[m - 1 - own] + plan.cost[own]
                if total < next_cost[m]:
                    next_cost[m], next_tops[m] = total, tops[m - 1 - own] + plan.tops[own]
        cost, tops = next_cost, next_tops
    return _Plans(tuple(cost), tuple(tops))


def _levels(values: np.ndarray, counts: np.ndarray, count: int) -> tuple[int, ...]:
    """The tops of `count` runs of neighbouring values with the least padding in all (or of fewer)."""
    unique, rows = _coarse(values, counts, MAX_VALUES)
    runs = _runs(_upper(_run_rows(rows) * unique.astype(np.float64)), count)
    return tuple(int(unique[end]) for end in runs[-1][1])


def _runs(segment: np.ndarray, most: int) -> list[tuple[float, tuple[int, ...]]]:
    """The cheapest split of 0..n-1 into m runs, for m = 1..min(most, n): its cost and the runs' ends.

    Args:
      segment: [n, n]; segment[i, j] is the cost of the run i..j, infinite for i > j.
      most: the most runs.
    """
    size = len(segment)
    best = segment[0]
    choices: list[np.ndarray] = []
    found: list[tuple[float, tuple[int, ...]]] = [(float(best[-1]), (size - 1,))]
    for _ in range(1, min(most, size)):
        # candidates[i, j]: the best of one run fewer up to i - 1, then the run i..j
        candidates = np.full_like(segment, np.inf)
        candidates[1:] = best[:-1, None] + segment[1:]
        choices.append(candidates.argmin(axis=0))
        best = candidates.min(axis=0)
        ends = [size - 1]
        for choice in reversed(choices):
            ends.append(int(choice[ends[-1]]) - 1)
        found.append((float(best[-1]), tuple(reversed(ends))))
    return found


def _run_rows(rows: np.ndarray) -> np.ndarray:
    """[n, n] number of rows in the run i..j; meaningless for i > j."""
    ends = np.cumsum(rows)
    return np.maximum(ends[None, :] - (ends - rows)[:, None], 0)


def _upper(cost: np.ndarray) -> np.ndarray:
    """[n, n] float cost with runs that end before they start made infinite."""
    index = np.arange(len(cost))
    return np.where(index[:, None] <= index[None, :], cost.astype(np.float64), np.inf)


def _coarse(values: np.ndarray, counts: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct values and their row counts; beyond `most`, evenly spaced ones, the rest rounded up."""
    unique, inverse = np.unique(values, return_inverse=True)
    if len(unique) > most:
        kept = unique[np.unique(np.linspace(0, len(unique) - 1, most).round().astype(int))]
        unique, inverse = kept, np.searchsorted(kept, values)
    rows = np.bincount(inverse.reshape(-1), weights=counts, minlength=len(unique))
    return unique, rows.astype(np.int64)


def _between(values: np.ndarray, low: int, top: int) -> np.ndarray:
    return (values > low) & (values <= top)
