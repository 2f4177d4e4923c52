"""Run all gates in order: pairs dropped, pairs kept, and the figures before and after."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from prb_jax.behaviour.judges.chat import InWords
from prb_jax.building.gates import faults, judged, surface
from prb_jax.building.gates.gate import CANNOT_TELL, GateFigure, GateResult, Leak, Pair, share_found
from prb_jax.building.settings import DEFINITIONS, BuildSettings
from prb_jax.errors import PrbWarning, RunError, short_repr
from prb_jax.runs.progress import Count, show_progress
from prb_jax.seams import get

REWARDS: Final = "reward_models"
"""Sub-folder of a build with evaluations of reward models, which see no user."""

Finder = Callable[[Sequence[Pair]], Mapping[str, str]]
"""Maps pairs to the ids of faulty ones, each with the reason."""

Measure = Callable[[Sequence[Pair]], GateFigure]


@dataclass
class GatedPairs:
    """Pairs on their way through the gates: the pairs that remain, and the results of the gates in order."""

    settings: BuildSettings
    kept: list[Pair]
    # by id: the gate that dropped the pair, and the reason
    dropped: dict[str, tuple[str, str]] = field(default_factory=dict)
    results: list[GateResult] = field(default_factory=list)
    # by id: the reason of each relaxed gate
    let_through: dict[str, dict[str, str]] = field(default_factory=dict)

    __repr__ = short_repr

    def check(self) -> None:
        """Raise RunError for gates that failed and are not relaxed."""
        failed = [result for result in self.results if not result.after.passed and not result.relaxed]
        if not failed:
            return
        figures = "; ".join(f"{result.name}: {in_words(result)}" for result in failed)
        relax = " ".join(f"--relax {result.name}" for result in failed)
        raise RunError(
            f"{len(failed)} of {len(self.results)} gates failed: {figures}. All files are kept, and gate_figures.json "
            "has every figure. Change the settings and build in another folder, or repeat the command with "
            f"{relax}, which the card will always mention"
        )

    def warn(self) -> None:
        """Warn of gates that pass only because there are too few pairs to find a leak."""
        small = [result for result in self.results if result.verdict == CANNOT_TELL and not result.relaxed]
        if small:
            named = "; ".join(f"{result.name}: {leak_in_words(result.after.leak)}" for result in small)
            warnings.warn(
                f"{len(small)} gates found no leak, but the pairs are too few to exclude one: {named}. Build more "
                "pairs; gates.require_sound=true makes such gates fail",
                PrbWarning,
                stacklevel=3,
            )

    def drop(self, name: str, find: Finder | None, *, before: Sequence[Pair]) -> None:
        """Drop the pairs that a gate finds, unless it is relaxed; a gate without its inputs fails."""
        if find is None:
            return self.add(name, None, None)
        reasons, count = find(self.kept), 0
        if name in self.settings.relax:
            for pair, reason in reasons.items():
                self.let_through.setdefault(pair, {})[name] = reason
        else:
            count = len(reasons)
            self.dropped |= {pair: (name, reason) for pair, reason in reasons.items()}
            self.kept = [pair for pair in self.kept if pair.id not in reasons]
        after = share_found(self.kept, find(self.kept))
        return self.add(name, share_found(before, find(before)), after, count)

    def measure(self, name: str, measure: Measure | None, *, before: Sequence[Pair]) -> None:
        """Measure all pairs; a gate without its inputs fails."""
        if measure is None:
            return self.add(name, None, None)
        none = GateFigure(None, 0, passed=False, note="no pairs")
        first, after = (measure(pairs) if pairs else none for pairs in (before, self.kept))
        return self.add(name, first, after)

    def add(self, name: str, before: GateFigure | None, after: GateFigure | None, dropped: int = 0) -> None:
        """Add the result of a gate; without a figure it was not tried."""
        relaxed, tried = name in self.settings.relax, after is not None
        definition = DEFINITIONS.get(name)
        if definition is None:
            plugin = get("gates", name)
            about = (plugin.value.__doc__ or "").strip().partition("\n")[0]
            definition = f"share of pairs in which {plugin.origin} finds a fault{about and f': {about}'}"
        untried = GateFigure(None, len(self.kept), passed=False, note="not tried: no model or data given")
        self.results.append(GateResult(name, definition, before, after or untried, dropped, relaxed, tried))

    def with_provenance(self, pair: Pair) -> Pair:
        """Return a pair whose provenance lists the gates it passed, and the faults that relaxed gates let through."""
        reasons = self.let_through.get(pair.id, {})
        gates = {}
        for result in self.results:
            verdict = "relaxed" if result.tried and not result.after.passed else result.verdict
            gates[result.name] = f"relaxed: {reasons[result.name]}" if result.name in reasons else verdict
        return replace(pair, provenance={**pair.provenance, "gates": gates})


def in_words(result: GateResult) -> str:
    """Format the figure of a gate for a message."""
    after = result.after
    note = f" ({after.note})" if after.note else ""
    if result.verdict == CANNOT_TELL:
        note += f"; {CANNOT_TELL}: {leak_in_words(after.leak)}"
    return f"{figure_in_words(asdict(after))} of {after.n:,} pairs: {result.definition}{note}"


def figure_in_words(figure: Mapping[str, Any] | None) -> str:
    """Format a figure from JSON as ``0.512 [0.430..0.594]``; "-" if there is none."""
    if figure is None or figure["value"] is None:
        return "-"
    bounds = figure["interval"]
    interval = "" if bounds is None else f" [{bounds[0]:.3f}..{bounds[1]:.3f}]"
    return f"{figure['value']:.3f}{interval}"


def leak_in_words(leak: Leak | None) -> str:
    """Describe the leak that a gate leaves possible, for a message."""
    assert leak is not None
    least = "none at all" if leak.detectable is None else f"one of {leak.detectable:.3f}"
    return f"a leak up to {leak.excluded:.3f} is not excluded (margin {leak.margin:g}); found 80 % of the time: {least}"


def run_gates(
    first: Sequence[Pair],
    pairs: Sequence[Pair],
    *,
    records: int,
    settings: BuildSettings,
    judge: InWords | None,
    folder: Path,
    progress: bool = False,
) -> GatedPairs:
    """Pass the best-matched pairs of ``records`` records through all gates.

    Args:
      first: The generator's first answers for both sides of each record, without selection, for the figures before.
        Gates that judge or score answers use the pairs that reach them instead.

    Raises:
      PrbError: a judge, a reward model or a known test set is not usable.
    """
    gates, gated = settings.gates, GatedPairs(settings, list(pairs))
    known = faults.read_known_texts(gates.known, words=gates.overlap_words) if gates.known else None
    finders: dict[str, Finder | None] = {
        "refusals": faults.find_refusals,
        "truncations": faults.find_truncations,
        "copied-aspects": partial(faults.find_copied_aspects, words=gates.copied_words),
        "personal-text": faults.find_personal_texts,
        "duplicates": partial(faults.find_duplicates, least=gates.similarity),
        "overlap": known and partial(faults.find_overlaps, known=known),
        **{name: get("gates", name).value for name in gates.plugins},
    }
    for name, find in finders.items():
        gated.drop(name, find, before=first)

    reached, rubric, blind, rewards = list(gated.kept), None, None, None
    if judge is not None:
        shares = {}
        for kind in (judged.RUBRIC, judged.BLIND):
            count = Count(len(reached), unit="pairs")
            with show_progress(f"{kind} judge", count, enabled=progress) as display:
                shares[kind] = judged.judge_pairs(
                    reached, kind, judge, folder=folder, advance=display.advance
                )
        rubric = partial(judged.find_unseparated, shares=shares[judged.RUBRIC])
        blind = partial(judged.measure_blind_judge, shares=shares[judged.BLIND], gates=gates)
    if models := gates.reward_models:
        wins = judged.reward_model_wins(reached, models, folder=folder / REWARDS, progress=progress)
        rewards = partial(judged.measure_blind_rewards, wins=wins, gates=gates)
    gated.drop("rubric-judge", rubric, before=reached)
    gated.measure("length", partial(surface.measure_length, gates=gates), before=first)
    gated.measure("style", partial(surface.measure_style, gates=gates), before=first)
    gated.measure("style-histogram", partial(surface.measure_histogram, gates=gates), before=first)
    gated.measure("blind-judge", blind, before=reached)
    gated.measure("blind-reward", rewards, before=reached)

    share = len(gated.kept) / records
    note = f"{len(pairs):,} of {records:,} records gave a pair, {len(gated.kept):,} are kept"
    passed = share >= gates.least_yield and bool(gated.kept)
    after = GateFigure(share, records, passed=passed, note=note)
    gated.add("yield", GateFigure(len(pairs) / records, records), after)
    gated.kept = [gated.with_provenance(pair) for pair in gated.kept]
    return gated
