"""All gates, one after the other: what is left out, what is kept, and the figures before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from prb_jax.building.gates import (
    blind_judge,
    blind_reward,
    copied_aspects,
    duplicates,
    length,
    overlap,
    personal_text,
    refusals,
    rubric_judge,
    style,
    truncations,
)
from prb_jax.building.gates.gate import Figure, GateResult, Pair, share_found
from prb_jax.building.gates.overlap import read_known
from prb_jax.building.judging import BLIND, RUBRIC, Verdicts, judge_pairs
from prb_jax.building.settings import BuildSettings
from prb_jax.errors import RunError, short_repr
from prb_jax.judges.chat import ChatModel
from prb_jax.runs.progress import Count, show_progress

REWARDS = "reward_models"
"""In the folder of a build: the evaluations of reward models that are shown no user."""

_YIELD = "share of the records that gave a pair which every gate let through"
_NOT_TRIED = "not tried: nothing is given to try it"

Finder = Callable[[Sequence[Pair]], Mapping[str, str]]


@dataclass(frozen=True)
class Gated:
    """What the gates say.

    Attributes:
      kept: pairs that are published.
      dropped: by id, the gate and the reason for which a pair is left out.
      results: of every gate, in their order.
    """

    kept: Sequence[Pair]
    dropped: Mapping[str, tuple[str, str]]
    results: Sequence[GateResult]

    __repr__ = short_repr

    def check(self) -> None:
        """Raise RunError for the gates that failed and are not relaxed."""
        failed = [each for each in self.results if not each.passed and not each.relaxed]
        if not failed:
            return
        told = "; ".join(f"{each.name}: {tell(each)}" for each in failed)
        relax = " ".join(f"--relax {each.name}" for each in failed)
        raise RunError(
            f"{len(failed)} of {len(self.results)} gates failed: {told}. All that was written is kept, and "
            "gate_figures.json has every figure. Change what is written in another folder, or repeat the command with "
            f"{relax}, which the card will say for ever"
        )


def tell(result: GateResult) -> str:
    """Return what a gate found, for a message."""
    after = result.after
    value = "-" if after.value is None else f"{after.value:.3f}"
    interval = "" if after.interval is None else f" [{after.interval[0]:.3f}..{after.interval[1]:.3f}]"
    note = f" ({after.note})" if after.note else ""
    return f"{value}{interval} of {after.n:,} pairs: {result.definition}{note}"


@dataclass
class _Line:
    """Pairs on their way through the gates."""

    settings: BuildSettings
    kept: list[Pair]
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)
    results: list[GateResult] = field(default_factory=list)
    let_through: dict[str, dict[str, str]] = field(default_factory=dict)

    def stamped(self, pair: Pair) -> Pair:
        """Return a pair whose provenance says which gates it passed, and which fault a relaxed one let through."""
        own = self.let_through.get(pair.id, {})
        gates = {
            each.name: f"relaxed: {own[each.name]}"
            if each.name in own
            else "relaxed"
            if each.tried and not each.passed
            else each.verdict
            for each in self.results
        }
        return replace(pair, provenance={**pair.provenance, "gates": gates})

    def drop(self, name: str, definition: str, find: Finder | None, *, before: Sequence[Pair]) -> None:
        """Leave out what a gate finds, unless it is relaxed; without a way to find anything it fails."""
        if find is None:
            return self.add(name, definition, None, None)
        found = find(self.kept)
        if name not in self.settings.relax:
            self.dropped |= {pair: (name, reason) for pair, reason in found.items()}
            self.kept = [pair for pair in self.kept if pair.id not in found]
        for pair, reason in found.items() if name in self.settings.relax else ():
            self.let_through.setdefault(pair, {})[name] = reason
        count = len(found) if name not in self.settings.relax else 0
        left = share_found(self.kept, find(self.kept))
        return self.add(name, definition, share_found(before, find(before)), left, count)

    def add(
        self, name: str, definition: str, before: Figure | None, after: Figure | None, dropped: int = 0
    ) -> None:
        """Note what a gate says."""
        figure = after or Figure(None, len(self.kept), passed=False, note=_NOT_TRIED)
        relaxed = name in self.settings.relax
        self.results.append(GateResult(name, definition, before, figure, dropped, relaxed, after is not None))


def run_gates(
    first: Sequence[Pair],
    pairs: Sequence[Pair],
    *,
    records: int,
    settings: BuildSettings,
    judge: ChatModel | None,
    folder: Path,
    progress: bool = False,
) -> Gated:
    """Send pairs through all gates.

    Args:
      first: the first answers that the generator wrote for both sides of each record, whatever they are: figures
        before. Those of gates that judge or score answers are of the pairs that get so far.
      pairs: the best-matched ones.
      records: how many there are.
      settings: of the build.
      judge: of the two gates that need one.
      folder: of the build, held by this process.
      progress: shows progress on standard error.

    Raises:
      PrbError: a judge, a reward model or a known test set cannot be used.
    """
    gates, line = settings.gates, _Line(settings, list(pairs))
    known = read_known(gates.known, words=gates.overlap_words) if gates.known else None
    copies = partial(copied_aspects.find, words=gates.copied_words)
    near = partial(duplicates.find, least=gates.similarity)
    overlapping = None if known is None else partial(overlap.find, known=known)
    line.drop("refusals", refusals.DEFINITION, refusals.find, before=first)
    line.drop("truncations", truncations.DEFINITION, truncations.find, before=first)
    line.drop("copied-aspects", copied_aspects.DEFINITION, copies, before=first)
    line.drop("personal-text", personal_text.DEFINITION, personal_text.find, before=first)
    line.drop("duplicates", duplicates.DEFINITION, near, before=first)
    line.drop("overlap", overlap.DEFINITION, overlapping, before=first)

    reached = list(line.kept)
    verdicts = _verdicts(reached, judge, folder=folder, progress=progress)
    separates = None if verdicts is None else partial(rubric_judge.find, verdicts=verdicts[RUBRIC])
    line.drop("rubric-judge", rubric_judge.DEFINITION, separates, before=reached)
    for name, gate in (("length", length), ("style", style)):
        before, after = (gate.measure(some, level=gates.level) for some in (first, line.kept))
        line.add(name, gate.DEFINITION, before, after)
    before = after = None
    if verdicts is not None:
        blind = verdicts[BLIND]
        before, after = (blind_judge.measure(some, blind, level=gates.level) for some in (reached, line.kept))
    line.add("blind-judge", blind_judge.DEFINITION, before, after)
    before = after = None
    if gates.reward_models:
        wins = blind_reward.wins(reached, gates.reward_models, folder=folder / REWARDS, progress=progress)
        before, after = (blind_reward.measure(some, wins, level=gates.level) for some in (reached, line.kept))
    line.add("blind-reward", blind_reward.DEFINITION, before, after)

    share = len(line.kept) / records
    note = f"{len(pairs):,} of {records:,} records gave a pair, {len(line.kept):,} are kept"
    passed = share >= gates.least_yield and bool(line.kept)
    after = Figure(share, records, passed=passed, note=note)
    line.add("yield", _YIELD, Figure(len(pairs) / records, records), after)
    return Gated([line.stamped(pair) for pair in line.kept], line.dropped, line.results)


def _verdicts(
    pairs: Sequence[Pair], judge: ChatModel | None, *, folder: Path, progress: bool
) -> dict[str, dict[str, Verdicts]] | None:
    """The verdicts of both kinds; None without a judge."""
    if judge is None:
        return None
    found = {}
    for kind in (RUBRIC, BLIND):
        count = Count(len(pairs), unit="pairs")
        with show_progress(f"{kind} judge", count, enabled=progress) as display:
            found[kind] = judge_pairs(pairs, kind, judge, folder=folder, advance=display.advance)
    return found
