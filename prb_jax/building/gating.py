"""All gates, one after the other: what is left out, what is kept, and the figures before and after."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from prb_jax.building.gates import judged
from prb_jax.building.gates.answers import (
    find_copied_aspects,
    find_duplicates,
    find_refusals,
    find_truncations,
)
from prb_jax.building.gates.gate import CANNOT_TELL, Figure, GateResult, Leak, Pair, share_found
from prb_jax.building.gates.surface import measure_histogram, measure_length, measure_style
from prb_jax.building.gates.texts import find_overlaps, find_personal_texts, read_known_texts
from prb_jax.building.settings import DEFINITIONS, BuildSettings
from prb_jax.errors import PrbWarning, RunError, short_repr
from prb_jax.judges.chat import ChatModel
from prb_jax.plugins import get_plugin
from prb_jax.runs.progress import Count, show_progress

REWARDS: Final = "reward_models"
"""In the folder of a build: the evaluations of reward models that are shown no user."""

Finder = Callable[[Sequence[Pair]], Mapping[str, str]]
"""Gives the pairs with a fault by their ids, with the reason of each."""

Measure = Callable[[Sequence[Pair]], Figure]


@dataclass
class Gated:
    """Pairs on their way through the gates.

    Attributes:
      settings: of the build.
      kept: pairs that are left.
      dropped: by id, the gate and the reason for which a pair is left out.
      results: of every gate, in their order.
      let_through: by id, the reason of each relaxed gate.
    """

    settings: BuildSettings
    kept: list[Pair]
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)
    results: list[GateResult] = field(default_factory=list)
    let_through: dict[str, dict[str, str]] = field(default_factory=dict)

    __repr__ = short_repr

    def check(self) -> None:
        """Raise RunError for the gates that failed and are not relaxed."""
        failed = [result for result in self.results if not result.after.passed and not result.relaxed]
        if not failed:
            return
        figures = "; ".join(f"{result.name}: {in_words(result)}" for result in failed)
        relax = " ".join(f"--relax {result.name}" for result in failed)
        raise RunError(
            f"{len(failed)} of {len(self.results)} gates failed: {figures}. All that was written is kept, and "
            "gate_figures.json has every figure. Change what is written in another folder, or repeat the command with "
            f"{relax}, which the card will say for ever"
        )

    def warn(self) -> None:
        """Warn of the gates that let the pairs through only because there are few of them."""
        small = [result for result in self.results if result.verdict == CANNOT_TELL and not result.relaxed]
        if small:
            told = "; ".join(f"{result.name}: {leak_in_words(result.after.leak)}" for result in small)
            warnings.warn(
                f"{len(small)} gates found no leak, but cannot tell at this size whether there is one: {told}. More "
                "pairs tell; gates.require_sound=true makes such gates fail",
                PrbWarning,
                stacklevel=3,
            )

    def drop(self, name: str, find: Finder | None, *, before: Sequence[Pair]) -> None:
        """Leave out what a gate finds, unless it is relaxed; without a way to find anything it fails."""
        if find is None:
            return self.add(name, None, None)
        reasons = find(self.kept)
        if name in self.settings.relax:
            for pair, reason in reasons.items():
                self.let_through.setdefault(pair, {})[name] = reason
        else:
            self.dropped |= {pair: (name, reason) for pair, reason in reasons.items()}
            self.kept = [pair for pair in self.kept if pair.id not in reasons]
        count = 0 if name in self.settings.relax else len(reasons)
        after = share_found(self.kept, find(self.kept))
        return self.add(name, share_found(before, find(before)), after, count)

    def measure(self, name: str, measure: Measure | None, *, before: Sequence[Pair]) -> None:
        """Measure all pairs; without a way to measure them the gate fails."""
        if measure is None:
            return self.add(name, None, None)
        return self.add(name, measure(before), measure(self.kept))

    def add(self, name: str, before: Figure | None, after: Figure | None, dropped: int = 0) -> None:
        """Add the result of a gate."""
        figure = after or Figure(
            None, len(self.kept), passed=False, note="not tried: nothing is given to try it"
        )
        relaxed = name in self.settings.relax
        self.results.append(
            GateResult(name, _definition(name), before, figure, dropped, relaxed, after is not None)
        )

    def with_provenance(self, pair: Pair) -> Pair:
        """Return a pair whose provenance says which gates it passed, and which fault a relaxed one let through."""
        reasons = self.let_through.get(pair.id, {})
        gates = {}
        for result in self.results:
            verdict = "relaxed" if result.tried and not result.after.passed else result.verdict
            gates[result.name] = f"relaxed: {reasons[result.name]}" if result.name in reasons else verdict
        return replace(pair, provenance={**pair.provenance, "gates": gates})


def _definition(name: str) -> str:
    if name in DEFINITIONS:
        return DEFINITIONS[name]
    plugin = get_plugin("gates", name)
    about = (plugin.value.__doc__ or "").strip().partition("\n")[0]
    return f"share of pairs in which {plugin.origin} finds a fault{about and f': {about}'}"


def in_words(result: GateResult) -> str:
    """Return the figure of a gate for a message."""
    after = result.after
    value = "-" if after.value is None else f"{after.value:.3f}"
    interval = "" if after.interval is None else f" [{after.interval[0]:.3f}..{after.interval[1]:.3f}]"
    note = f" ({after.note})" if after.note else ""
    if result.verdict == CANNOT_TELL:
        note += f"; {CANNOT_TELL}: {leak_in_words(after.leak)}"
    return f"{value}{interval} of {after.n:,} pairs: {result.definition}{note}"


def leak_in_words(leak: Leak | None) -> str:
    """Return what a gate can say of a leak, for a message."""
    assert leak is not None
    least = "none at all" if leak.detectable is None else f"one of {leak.detectable:.3f}"
    return f"a leak up to {leak.excluded:.3f} is not excluded (margin {leak.margin:g}); found 80 % of the time: {least}"


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
    gates, gated = settings.gates, Gated(settings, list(pairs))
    overlaps = rubric = blind = rewards = None
    if gates.known:
        overlaps = partial(find_overlaps, known=read_known_texts(gates.known, words=gates.overlap_words))
    gated.drop("refusals", find_refusals, before=first)
    gated.drop("truncations", find_truncations, before=first)
    gated.drop("copied-aspects", partial(find_copied_aspects, words=gates.copied_words), before=first)
    gated.drop("personal-text", find_personal_texts, before=first)
    gated.drop("duplicates", partial(find_duplicates, least=gates.similarity), before=first)
    gated.drop("overlap", overlaps, before=first)
    for name in gates.plugins:
        gated.drop(name, get_plugin("gates", name).value, before=first)

    reached = list(gated.kept)
    if judge is not None:
        verdicts = {}
        for kind in (judged.RUBRIC, judged.BLIND):
            with show_progress(
                f"{kind} judge", Count(len(reached), unit="pairs"), enabled=progress
            ) as display:
                verdicts[kind] = judged.judge_pairs(
                    reached, kind, judge, folder=folder, advance=display.advance
                )
        rubric = partial(judged.find_unseparated, verdicts=verdicts[judged.RUBRIC])
        blind = partial(judged.measure_blind_judge, verdicts=verdicts[judged.BLIND], gates=gates)
    gated.drop("rubric-judge", rubric, before=reached)
    gated.measure("length", partial(measure_length, gates=gates), before=first)
    gated.measure("style", partial(measure_style, gates=gates), before=first)
    gated.measure("style-histogram", partial(measure_histogram, gates=gates), before=first)
    gated.measure("blind-judge", blind, before=reached)
    if gates.reward_models:
        wins = judged.reward_model_wins(
            reached, gates.reward_models, folder=folder / REWARDS, progress=progress
        )
        rewards = partial(judged.measure_blind_rewards, wins=wins, gates=gates)
    gated.measure("blind-reward", rewards, before=reached)

    share = len(gated.kept) / records
    note = f"{len(pairs):,} of {records:,} records gave a pair, {len(gated.kept):,} are kept"
    passed = share >= gates.least_yield and bool(gated.kept)
    after = Figure(share, records, passed=passed, note=note)
    gated.add("yield", Figure(len(pairs) / records, records), after)
    gated.kept = [gated.with_provenance(pair) for pair in gated.kept]
    return gated
