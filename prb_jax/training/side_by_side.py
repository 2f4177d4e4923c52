"""The sums of a step over its microbatches: on one CPU device one for each core at a time, elsewhere one by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np

from prb_jax.models.decoder import Params
from prb_jax.runs.progress import compiling
from prb_jax.scoring.batching import batch_sizes, lanes
from prb_jax.training.microbatches import Microbatch
from prb_jax.training.step import TrainState, TrainStep, sums_of, without_sums

_compiling = threading.Lock()
_compiled: WeakKeyDictionary[Any, set[tuple[tuple[int, ...], ...]]] = WeakKeyDictionary()
"""The shapes for which each program is compiled."""


def add_gradients(
    step: TrainStep, state: TrainState, frozen: Params, batches: Sequence[Microbatch]
) -> TrainState:
    """Return the state, which is donated, with the gradient sums of the microbatches of a step.

    They are added in the order in which they are given, however many are computed side by side: the sums have the
    same bits. Each that is computed holds activations and gradients of its own, so that there are fewer at a time where
    these would fill the memory.
    """
    if lanes(step.mesh) == 1:
        for microbatch in batches:
            placed = step.place(microbatch.batch, microbatch.extras)
            with compiling(step.accumulate, *batch_sizes(microbatch.batch)):
                state = step.accumulate(state, frozen, *placed)
        return state
    rest, sums = without_sums(state), sums_of(state)
    # Gradients are held twice: one that is done may wait for its turn to be added.
    gradients = sum(leaf.nbytes for leaf in jax.tree.leaves(sums))
    held = 2 * gradients + max((microbatch.activations for microbatch in batches), default=0.0)
    count = lanes(step.mesh, held=held)
    waiting: deque[Future[TrainState]] = deque()
    with ThreadPoolExecutor(count, thread_name_prefix="gradients") as computing:
        for microbatch in batches:
            waiting.append(computing.submit(_gradients, step, rest, frozen, microbatch))
            if len(waiting) > count:
                sums = step.add(sums, waiting.popleft().result())
        while waiting:
            sums = step.add(sums, waiting.popleft().result())
    return {**rest, **sums}


def _gradients(step: TrainStep, state: TrainState, frozen: Params, microbatch: Microbatch) -> TrainState:
    """The sums of one microbatch, which are waited for: a thread computes one at a time."""
    placed = step.place(microbatch.batch, microbatch.extras)
    shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(placed))
    with _compiling:  # by one thread alone
        known = _compiled.setdefault(step.gradients, set())
        sums = None
        if shapes not in known:
            with compiling(step.gradients, *batch_sizes(microbatch.batch)):
                sums = step.gradients(state, frozen, *placed)
            known.add(shapes)
    if sums is None:
        sums = step.gradients(state, frozen, *placed)
    return jax.block_until_ready(sums)
