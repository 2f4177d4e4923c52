"""What shapes cost, and the search for the cheapest: dynamic programming, then a descent that betters its result.

Throughout, a bucket is its three sides (P, K, R), `cells` int [n, 3] are the distinct rounded tree
shapes in ascending order and `counts` int [n] the number of trees of each.

The dynamic programme splits the cells by K, each part by response length, each of those by prefix
length, always into runs of neighbouring values; for a given nesting it finds the best split. The
descent then moves one side of one bucket at a time, which also reaches shapes that are not nested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prb_jax.trees.batches import Sides

# More levels than these change the cost by little and the search time by much.
MAX_K_LEVELS = 4
MAX_RESPONSE_LEVELS = 3
MAX_VALUES = 96
MAX_MOVES = 64
MAX_SWEEPS = 6


@dataclass(frozen=True)
class ShapeOptions:
    """How shapes are chosen, and what they cost: all costs are in tokens of the program that runs them.

    Raises:
      ValueError: a number that must be positive is not.
    """

    tokens_per_batch: int  # padded tokens of a batch stay at or below this where `divisor` rows allow it
    # rows of a batch are a multiple of it: the number of parts that the mesh splits a batch into
    divisor: int = 1
    multiple: int = 16  # P and R are multiples of this (16 is fine on CPU and GPU, 128 suits TPU kernels)
    max_buckets: int = 8  # most shapes, and so compiles, for the lengths that they are chosen from
    attention_length: int = 8_192  # context length at which attention costs as much as the rest of the model
    compile_cost: float = 32_768
    """Of one more shape: seconds of a compile times tokens per second. Little data leads to few shapes."""
    # of starting one more batch; by default so much that there are as few as possible
    batch_cost: int = 1 << 40

    def __post_init__(self) -> None:
        for name in ("tokens_per_batch", "divisor", "multiple", "max_buckets", "attention_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")

    def cell_cost(self, prefix: np.ndarray | int, responses: int, response_length: int) -> np.ndarray:
        """Cost of one padded row: its columns plus its attention.

        A query-key pair costs 1 / attention_length of what a token costs in the rest of the model, and
        there are P^2 / 2 + K R (P + R / 2) pairs.
        """
        p = np.asarray(prefix, np.float64)
        block = float(responses * response_length)
        pairs = p * p / 2 + block * (p + response_length / 2)
        return p + block + pairs / self.attention_length

    def most_rows(self, tokens: np.ndarray | int) -> np.ndarray:
        """The most rows of `tokens` columns in a batch."""
        return np.maximum(self.tokens_per_batch // np.asarray(tokens) // self.divisor, 1) * self.divisor

    def best_rows(self, tokens: int, counts: np.ndarray) -> int:
        """The rows of a batch, of `tokens` columns each, that cost least when `counts` rows are dealt into batches."""
        largest = min(
            int(self.most_rows(tokens)), -(-max(int(counts.max()), 1) // self.divisor) * self.divisor
        )
        sizes = np.arange(self.divisor, largest + 1, self.divisor)
        batches = -(-counts[:, None] // sizes)
        cost = (batches * (sizes * tokens + self.batch_cost)).sum(axis=0)
        return int(sizes[len(sizes) - 1 - cost[::-1].argmin()])  # of equals the largest

    def padded_rows(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Rows computed when `rows` are dealt evenly into as few whole batches as possible."""
        batches = np.maximum(-(-rows // self.most_rows(tokens)), 1)
        return -(-rows // (batches * self.divisor)) * self.divisor * batches

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
        row_costs = np.asarray([float(self.cell_cost(*top)) for top in tops])
        if not np.isfinite(costs.min(axis=0)).all():
            return float("inf")
        return float(
            (self.padded_rows(rows, tokens) * row_costs).sum() + self.compile_cost * (rows > 0).sum()
        )


@dataclass(frozen=True)
class _Splits:
    """For m = 1, 2, ... buckets: the least cost without compiles (index m - 1), and the buckets."""

    cost: tuple[float, ...]
    tops: tuple[tuple[Sides, ...], ...]


def split_by_k(cells: np.ndarray, counts: np.ndarray, options: ShapeOptions) -> tuple[Sides, ...]:
    """The best nested split into at most `max_buckets` buckets."""
    best_cost, best = float("inf"), ()
    for splits in _by_levels(cells, counts, 1, MAX_K_LEVELS, _split_by_response, options):
        for m, (cost, chosen) in enumerate(zip(splits.cost, splits.tops, strict=True), start=1):
            if cost + m * options.compile_cost < best_cost:
                best_cost, best = cost + m * options.compile_cost, chosen
    return best


def refine(
    cells: np.ndarray, counts: np.ndarray, tops: Sequence[Sides], options: ShapeOptions
) -> tuple[Sides, ...]:
    """Betters `tops` by moving one side of one bucket at a time, until no move lowers the cost."""
    current = sorted(set(tops))
    values = [_coarse(cells[:, side], counts, MAX_MOVES)[0] for side in range(3)]
    costs = options.row_costs(cells, current)
    least = options.total(costs, counts, current)
    for _ in range(MAX_SWEEPS):
        before = least
        moves = (
            (b, side, int(value)) for b in range(len(current)) for side in range(3) for value in values[side]
        )
        for b, side, value in moves:
            sides = [*current[b]]
            sides[side] = value
            moved = (sides[0], sides[1], sides[2])
            trial, trial_costs = [*current[:b], moved, *current[b + 1 :]], costs.copy()
            trial_costs[b] = options.row_cost(cells, moved)
            total = options.total(trial_costs, counts, trial)
            if total < least:
                current, costs, least = trial, trial_costs, total
        if least == before:
            break
    return tuple(sorted(set(current)))


def _by_levels(
    cells: np.ndarray,
    counts: np.ndarray,
    side: int,
    most: int,
    split: Callable[..., _Splits],
    options: ShapeOptions,
    *chosen: int,
) -> Iterator[_Splits]:
    """For 1, 2, ... `most` levels of one side: the best splits when `split` splits each level on its own."""
    values = cells[:, side]
    for levels in range(1, min(most, options.max_buckets) + 1):
        tops = _levels(values, counts, levels)
        if len(tops) < levels:
            return
        parts = [(values > low) & (values <= top) for low, top in zip((0, *tops[:-1]), tops, strict=True)]
        yield _join(
            [
                split(cells[part], counts[part], options, *chosen, top)
                for part, top in zip(parts, tops, strict=True)
            ],
            options.max_buckets,
        )


def _split_by_response(
    cells: np.ndarray, counts: np.ndarray, options: ShapeOptions, responses: int
) -> _Splits:
    cost = [float("inf")] * options.max_buckets
    best: list[tuple[Sides, ...]] = [()] * options.max_buckets
    for splits in _by_levels(cells, counts, 2, MAX_RESPONSE_LEVELS, _split_by_prefix, options, responses):
        for m in range(options.max_buckets):
            if splits.cost[m] < cost[m]:
                cost[m], best[m] = splits.cost[m], splits.tops[m]
    return _Splits(tuple(cost), tuple(best))


def _split_by_prefix(
    cells: np.ndarray, counts: np.ndarray, options: ShapeOptions, responses: int, response_length: int
) -> _Splits:
    values, rows = _coarse(cells[:, 0], counts, MAX_VALUES)
    tokens = values + responses * response_length
    padded = options.padded_rows(_run_rows(rows), np.broadcast_to(tokens, (len(values), len(values))))
    segment = _upper(padded * options.cell_cost(values, responses, response_length))
    runs = _runs(segment, options.max_buckets)
    tops = [tuple((int(values[end]), responses, response_length) for end in ends) for _, ends in runs]
    missing = options.max_buckets - len(runs)
    return _Splits(tuple(cost for cost, _ in runs) + (float("inf"),) * missing, tuple(tops) + ((),) * missing)


def _join(parts: Sequence[_Splits], max_buckets: int) -> _Splits:
    """Shares m buckets among independent groups of rows, for every m, at least one for each."""
    cost, tops = list(parts[0].cost), list(parts[0].tops)
    for part in parts[1:]:
        next_cost = [float("inf")] * max_buckets
        next_tops: list[tuple[Sides, ...]] = [()] * max_buckets
        for m in range(1, max_buckets):
            for share in range(m):
                total = cost[m - 1 - share] + part.cost[share]
                if total < next_cost[m]:
                    next_cost[m], next_tops[m] = total, tops[m - 1 - share] + part.tops[share]
        cost, tops = next_cost, next_tops
    return _Splits(tuple(cost), tuple(tops))


def _levels(values: np.ndarray, counts: np.ndarray, count: int) -> tuple[int, ...]:
    """The tops of `count` runs of neighbouring values with the least padding in all (or of fewer)."""
    unique, rows = _coarse(values, counts, MAX_VALUES)
    runs = _runs(_upper(_run_rows(rows) * unique.astype(np.float64)), count)
    return tuple(int(unique[end]) for end in runs[-1][1])


def _runs(segment: np.ndarray, most: int) -> list[tuple[float, tuple[int, ...]]]:
    """The cheapest split of 0..n-1 into m runs, for m = 1..min(most, n): its cost and the runs' ends. The cost of the
    run i..j is ``segment[i, j]``, infinite for i > j."""
    size = len(segment)
    best = segment[0]
    choices: list[np.ndarray] = []
    runs: list[tuple[float, tuple[int, ...]]] = [(float(best[-1]), (size - 1,))]
    for _ in range(1, min(most, size)):
        # candidates[i, j]: the best of one run fewer up to i - 1, then the run i..j
        candidates = np.full_like(segment, np.inf)
        candidates[1:] = best[:-1, None] + segment[1:]
        choices.append(candidates.argmin(axis=0))
        best = candidates.min(axis=0)
        ends = [size - 1]
        for choice in reversed(choices):
            ends.append(int(choice[ends[-1]]) - 1)
        runs.append((float(best[-1]), tuple(reversed(ends))))
    return runs


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
