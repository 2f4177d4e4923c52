"""Which mesh and batch size suit a slice: tries them and orders what fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prb_jax.errors import MeshError
from prb_jax.models.config.decoder import DecoderConfig
from prb_jax.models.named_shapes import read_model
from prb_jax.plan.chips import describe_slice
from prb_jax.plan.planner import Plan, plan

LONG_TOKENS = 8192
"""From so many tokens of a tree on, splitting them over devices is tried."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Attributes:
      plans: those that fit, most FLOPs a second first; then the others, smallest peak first.
      refused: meshes that cannot be, with the reason.
    """

    plans: tuple[Plan, ...]
    refused: dict[str, str]

    @property
    def best(self) -> Plan | None:
        """The fastest that fits."""
        return self.plans[0] if self.plans and self.plans[0].fits else None


def sweep(
    model: str | Path | DecoderConfig,
    *,
    topology: str,
    slices: int = 1,
    batches: tuple[int, ...] = (),
    prefix: int = 3840,
    responses: int = 2,
    response_length: int = 128,
    questions_per_user: int = 1,
    report: Callable[[Plan], None] = lambda plan: None,
    **options: Any,
) -> Sweep:
    """Plans every mesh of fsdp x tensor (with tensor up to 8, and whole heads) with every batch size, and for long
    trees every one of fsdp x sequence x tensor too; of several slices each has a copy of the model.

    Args:
      batches: trees of a step; if none are given, those of one, two and four users (of one tree each without
        `questions_per_user`) for each part that the mesh splits a batch into. A batch size that one mesh does not
        divide is left out for that mesh. After one that does not fit, larger ones are not tried.
      report: called with each plan as soon as it is there.
      model, topology, slices, prefix, responses, response_length, questions_per_user, options: as in
        :func:`prb_jax.plan.plan`.

    Raises:
      As :func:`prb_jax.plan.plan`; MeshError also if no mesh at all divides the model and a batch.
    """
    place, config = describe_slice(topology, slices=slices), read_model(model)
    options |= {"prefix": prefix, "responses": responses, "response_length": response_length}
    options["questions_per_user"] = questions_per_user
    plans: list[Plan] = []
    refused: dict[str, str] = {}
    chips = len(place.devices) // slices
    long = prefix + responses * response_length >= LONG_TOKENS
    splits = [
        (sequence, tensor)
        for tensor in _divisors(chips, at_most=8)
        for sequence in (_divisors(chips // tensor, at_most=8) if long else (1,))
    ]
    for sequence, tensor in splits:
        shards = len(place.devices) // (sequence * tensor)
        rows = shards * questions_per_user
        mesh = f"fsdp={shards // slices}" + (f",sequence={sequence}" if long else "") + f",tensor={tensor}"
        mesh = mesh if slices == 1 else f"data={slices},{mesh}"
        for batch in sorted(batches) or (rows, 2 * rows, 4 * rows):
            try:
                planned = plan(config, topology=place, mesh=mesh, batch=batch, **options)
            except MeshError as error:
                refused[f"{mesh} batch={batch}"] = str(error)
                continue
            plans.append(planned)
            report(planned)
            if not planned.fits:
                break
    if not plans:
        raise MeshError(f"no mesh of {topology} can be: {next(iter(refused.values()))}")
    return Sweep(tuple(sorted(plans, key=_rank)), refused)


def _divisors(number: int, *, at_most: int) -> Iterator[int]:
    return (size for size in range(1, min(number, at_most) + 1) if number % size == 0)


def _rank(plan: Plan) -> tuple[bool, float]:
    speed = plan.flops / plan.estimated_seconds if plan.estimated_seconds else 0.0
    return not plan.fits, -speed if plan.fits else plan.peak_bytes_per_chip
