"""Attention over packed streams (:mod:`prb_jax.trees.streams`) on TPUs: a Pallas kernel, forward and backward.

A step of the kernel processes one block of queries and one block of keys from a table
(:mod:`prb_jax.trees.kernel_tables`). The table lists only pairs of blocks in which some query sees some key, so no
step is empty, regardless of the trees in the stream. Of each pair it names the area that is computed, one of a few
shapes that the kernel has code for. The number of steps is data: one program serves all trees.

Scores have the shape keys x queries, so that maxima, sums and other values per query are rows. The backward pass keeps
the logarithm of each softmax denominator and recomputes a block's weights, in two kernels: one walks through the keys
of each block of queries, the other through the queries of each block of keys.

Dimensions: N tokens, G kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from prb_jax.models.attention.choice import StreamAttention
from prb_jax.models.attention.first_use import kernel_fault
from prb_jax.models.attention.mesh import one_by_one
from prb_jax.models.attention.streams import ATTENTION_RESULTS, MASKED
from prb_jax.models.layers import narrow_product, soft_capped, with_sinks
from prb_jax.platform.sharding import sequence_parts
from prb_jax.trees.kernel_tables import AREA, FIRST, LAST, OFFSET, StepTable
from prb_jax.trees.step_areas import SEEN, TILE, Rectangle, step_areas
from prb_jax.trees.streams import StreamBatch


class Settings(NamedTuple):
    """Compile-time parameters of a kernel."""

    block: int  # queries per step, and keys per step
    window: int | None
    softcap: float | None
    interpret: bool


class KernelFacts(NamedTuple):
    """Inputs of a kernel that describe a stream, int32."""

    table: StepTable  # without the axes of streams and parts
    until: jax.Array  # [1, N]; see :class:`prb_jax.trees.streams.StreamBatch`
    positions: jax.Array  # [1, N]


def kernel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    batch: StreamBatch,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    mesh: Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Same as :func:`prb_jax.models.attention.streams.stream_attention`, by a kernel for TPUs.

    Products have factors in q's dtype and float32 sums; the softmax is float32. Padding sees only itself.

    Args:
        q, k, v, window, softcap, sinks, mesh: Same as there.
        batch: Streams with the table of steps for this window.
        interpret: If True, run the kernel's steps by XLA on any machine, for tests.
    """
    table = batch.table(window)
    if not isinstance(table, StepTable):
        raise ValueError(f"these streams have no table of a kernel's steps for a window of {window}")
    settings = Settings(table.block, window, softcap, interpret)

    if (parts := table.counts.shape[1]) != sequence_parts(mesh):
        raise ValueError(f"these streams are for queries in {parts} parts, found {sequence_parts(mesh)}")

    def stream(q: jax.Array, k: jax.Array, v: jax.Array, table: StepTable, of_keys: Any) -> Any:
        facts = KernelFacts(jax.tree.map(lambda x: x[0], table), *of_keys)
        by_head = [jnp.swapaxes(x, 0, 1) for x in (q, k, v)]
        results: Any = _attend(settings, *by_head, facts)
        return [jnp.swapaxes(x, 0, 1) for x in results]

    of_keys = [jnp.asarray(x)[:, None] for x in (batch.until, batch.positions)]
    out, log = one_by_one(stream, mesh)(q, k, v, jax.tree.map(jnp.asarray, table), of_keys)
    return with_sinks(out, log, sinks)


KERNEL = StreamAttention(
    "kernel (Pallas) over packed streams",
    "steps",
    has_sinks=True,
    refusal=lambda config, *, mesh, **_: kernel_fault(KERNEL, kernel_attention, config, mesh=mesh),
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    settings: Settings, q: jax.Array, k: jax.Array, v: jax.Array, facts: KernelFacts
) -> tuple[jax.Array, jax.Array]:
    """q [heads, N, H], k and v [G, N, H] -> [heads, N, H], and logarithms of denominators, float32 [heads, N]."""
    return _attend_forward(settings, q, k, v, facts)[0]


def _attend_forward(
    settings: Settings, q: jax.Array, k: jax.Array, v: jax.Array, facts: KernelFacts
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    heads, tokens, head_dim = q.shape
    out, log = _run(
        _forward,
        settings,
        facts,
        group=heads // len(k),
        of_queries=[q],
        of_keys=[k],
        key_columns=[v.swapaxes(1, 2)],
        made=[_columns(heads, head_dim, tokens, q.dtype), _columns(heads, 1, tokens, jnp.float32)],
        sums=[(1, settings.block), (1, settings.block), (head_dim, settings.block)],
    )
    out = out.swapaxes(1, 2)
    out, log = (checkpoint_name(x, name) for x, name in zip((out, log), ATTENTION_RESULTS, strict=True))
    return (out, log[:, 0]), (q, k, v, facts, out, log)


def _attend_backward(
    settings: Settings, kept: tuple[Any, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, facts, out, log = kept
    cotangent, by_log = cotangents
    (heads, tokens, head_dim), block = q.shape, settings.block
    # For each row, the derivative of a softmax needs only the sum of weight times derivative by weight. A logarithm of
    # the denominator has the weights as its derivatives by scores.
    inner_product = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    inner_product = (inner_product - by_log)[:, None]
    given: dict[str, Any] = {
        "group": heads // len(k),
        "of_queries": [q, cotangent],
        "query_columns": [log, inner_product],
        "of_keys": [k, v],
    }
    (to_q,) = _run(
        _by_query,
        settings,
        facts,
        **given,
        key_columns=[k.swapaxes(1, 2)],
        made=[_columns(heads, head_dim, tokens, q.dtype)],
        sums=[(head_dim, block)],
    )
    to_k, to_v = _run(
        _by_key,
        settings,
        facts,
        **given,
        made=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        sums=[(block, head_dim)] * 2,
        walk_queries=True,
    )
    return to_q.swapaxes(1, 2), to_k, to_v, None


_attend.defvjp(_attend_forward, _attend_backward)


def _columns(heads: int, rows: int, tokens: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an array with tokens as columns."""
    return jax.ShapeDtypeStruct((heads, rows, tokens), dtype)


def _run(
    kernel: Callable[..., None],
    settings: Settings,
    facts: KernelFacts,
    *,
    group: int,
    of_queries: Sequence[jax.Array],
    of_keys: Sequence[jax.Array],
    query_columns: Sequence[jax.Array] = (),
    key_columns: Sequence[jax.Array] = (),
    made: Sequence[jax.ShapeDtypeStruct],
    sums: Sequence[tuple[int, int]],
    walk_queries: bool = False,
) -> Sequence[jax.Array]:
    """Run a kernel over all heads and all steps of a stream.

    Args:
        group: Query heads per kv head.
        of_queries, of_keys: Arrays [heads or G, N, H], in the order of the kernel's arguments, followed by
        query_columns, key_columns: Arrays [heads or G, H or 1, N].
        made: Results, one block of columns per block of queries, or with ``walk_queries`` one per block of keys.
        sums: Shapes of the float32 accumulators that persist between steps.
        walk_queries: If True, the steps walk through the queries of each block of keys; otherwise through the keys of
            each block of queries.
    """
    block, table = settings.block, facts.table
    steps = table.by_key if walk_queries else table.by_query
    count, heads = table.counts[1 if walk_queries else 0], len(of_queries[0])
    # With walk_queries, heads that share keys are the innermost axis because their gradients add up.
    grid = (heads // group, count, group) if walk_queries else (heads, count)

    def head(place: Sequence[Any], *, shared: bool) -> Any:
        if walk_queries:
            return place[0] if shared else place[0] * group + place[2]
        return lax.div(place[0], group) if shared else place[0]

    def spec(row: int, *, shared: bool, columns: int | None = None, width: int = 0) -> pl.BlockSpec:
        """Return the specification of a step's block of queries (row 0 of the steps) or keys (row 1)."""

        def index(*place: Any) -> tuple[Any, ...]:  # grid indices, followed by the steps
            number = place[-1][row, place[1]]
            return (head(place, shared=shared), *((0, number) if columns else (number, 0)))

        return pl.BlockSpec((None, columns, block) if columns else (None, block, width), index)

    def of_fact(row: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, block), lambda *place: (0, place[-1][row, place[1]]))

    inputs, specs = [facts.until], [of_fact(1)]
    if settings.window is not None:
        inputs += [facts.positions, facts.positions]
        specs += [of_fact(1), of_fact(3)]
    for arrays, row in ((of_queries, 0), (of_keys, 1)):
        inputs += arrays
        specs += [spec(row, shared=row == 1, width=x.shape[2]) for x in arrays]
    for arrays, row in ((query_columns, 0), (key_columns, 1)):
        inputs += arrays
        specs += [spec(row, shared=row == 1, columns=x.shape[1]) for x in arrays]
    if walk_queries:
        results = [spec(1, shared=True, width=x.shape[2]) for x in made]
    else:
        results = [spec(0, shared=False, columns=x.shape[1]) for x in made]
    return pl.pallas_call(
        partial(kernel, settings),
        out_shape=made,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=specs,
            out_specs=results,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in sums],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(pltpu.PARALLEL, *[pltpu.ARBITRARY] * (len(grid) - 1))
        ),
        interpret=settings.interpret,
        name=f"stream{kernel.__name__}",
    )(steps, *inputs)


class _Step:
    """A step inside a kernel.

    Args:
        settings: Compile-time parameters.
        steps: Table of all steps [4, C].
        refs: References to the facts, followed by :attr:`arrays`.
    """

    def __init__(self, settings: Settings, steps: Any, refs: Sequence[Any]) -> None:
        number, facts = pl.program_id(1), 1 if settings.window is None else 3
        self.settings = settings
        self.key, self.flags, self.query = (steps[row, number] for row in (1, 2, 3))
        self.facts, self.arrays = refs[:facts], refs[facts:]

    def on(self, flag: int, also: Any = True) -> Callable[[Callable[[], None]], None]:
        """Run the decorated function in steps with this flag."""
        return pl.when(((self.flags & flag) != 0) & also)

    def add(self, add: Callable[[_Part], None]) -> None:
        """Call ``add`` for each part of the area of this step."""
        areas = step_areas(self.settings.block // TILE)
        offset = lax.div(self.flags, OFFSET)

        def body(number: int) -> Callable[[], None]:
            def parts() -> None:
                for rectangle in areas[number]:
                    add(_Part(self, rectangle, offset, masked=number != SEEN))

            return parts

        lax.switch(lax.div(lax.rem(self.flags, OFFSET), AREA), [body(number) for number in range(len(areas))])


class _Part:
    """Queries and keys of a step that are computed together.

    Attributes:
        queries, keys: Slices of the step's blocks; sizes are static.
    """

    def __init__(self, step: _Step, rectangle: Rectangle, offset: Any, *, masked: bool) -> None:
        self.step, self.masked = step, masked
        self.first_query, self.sizes = (
            rectangle.query * TILE,
            (rectangle.keys * TILE, rectangle.queries * TILE),
        )
        whole = self.sizes[0] == step.settings.block
        self.first_key = 0 if whole else pl.multiple_of(offset * TILE, TILE)
        self.keys = pl.ds(self.first_key, self.sizes[0])
        self.queries = pl.ds(self.first_query, self.sizes[1])

    def scores(self, q: Any, k: Any) -> jax.Array:
        """Return scores, float32 [keys, queries]: soft-capped, not masked."""
        scores = narrow_product(k[self.keys, :], q[self.queries, :], (1, 1))
        return soft_capped(scores, self.step.settings.softcap)

    def seen(self, x: jax.Array, other: float) -> jax.Array:
        """Replace the entries of an array [keys, queries] that are not visible by a number."""
        if not self.masked:
            return x
        settings, step = self.step.settings, self.step
        place = (
            step.query * settings.block + self.first_query + lax.broadcasted_iota(jnp.int32, self.sizes, 1)
        )
        key = step.key * settings.block + self.first_key + lax.broadcasted_iota(jnp.int32, self.sizes, 0)
        of_keys = [_column(fact[:, self.keys]) for fact in step.facts[:2]]
        seen = (key <= place) & (place < of_keys[0])
        if settings.window is not None:
            seen &= step.facts[2][:, self.queries] - of_keys[1] < settings.window
        return jnp.where(seen, x, other)


def _column(row: jax.Array) -> jax.Array:
    """[1, n] -> [n, 1]."""
    return jnp.broadcast_to(row, (TILE, row.shape[1])).T[:, :1]


def _forward(settings: Settings, steps: Any, *refs: Any) -> None:
    """Run a step of the forward pass: update the running maximum, sum and result of each query."""
    step = _Step(settings, steps, refs)
    q, k, v, out, log, top, total, result = step.arrays

    @step.on(FIRST)
    def _() -> None:
        top[...] = jnp.full_like(top, MASKED)
        total[...] = jnp.zeros_like(total)
        result[...] = jnp.zeros_like(result)

    @step.add
    def _(part: _Part) -> None:
        columns = slice(None), part.queries
        scores = part.seen(part.scores(q, k), MASKED)
        highest = jnp.maximum(top[columns], scores.max(axis=0, keepdims=True))
        weights, kept = jnp.exp(scores - highest), jnp.exp(top[columns] - highest)
        top[columns] = highest
        total[columns] = kept * total[columns] + weights.sum(axis=0, keepdims=True)
        result[columns] = kept * result[columns] + narrow_product(v[:, part.keys], weights.astype(v.dtype))

    @step.on(LAST)
    def _() -> None:
        out[...] = (result[...] / total[...]).astype(out.dtype)
        log[...] = top[...] + jnp.log(total[...])


def _pulled(part: _Part, refs: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    """Return the weights [keys, queries] of a part, and the derivatives by its scores, both in q's dtype."""
    q, cotangent, k, v, log, inner_product = refs
    capped, softcap = part.scores(q, k), part.step.settings.softcap
    weights = part.seen(jnp.exp(capped - log[:, part.queries]), 0.0)
    by_weight = narrow_product(v[part.keys, :], cotangent[part.queries, :], (1, 1))
    gradient = weights * (by_weight - inner_product[:, part.queries])
    if softcap is not None:
        gradient = gradient * (1.0 - jnp.square(capped / softcap))
    return weights.astype(q.dtype), gradient.astype(q.dtype)


def _by_query(settings: Settings, steps: Any, *refs: Any) -> None:
    """Run a step of the derivatives by queries."""
    step = _Step(settings, steps, refs)
    *given, key_columns, to_q, result = step.arrays

    @step.on(FIRST)
    def _() -> None:
        result[...] = jnp.zeros_like(result)

    @step.add
    def _(part: _Part) -> None:
        _, gradient = _pulled(part, given)
        result[:, part.queries] += narrow_product(key_columns[:, part.keys], gradient)

    @step.on(LAST)
    def _() -> None:
        to_q[...] = result[...].astype(to_q.dtype)


def _by_key(settings: Settings, steps: Any, *refs: Any) -> None:
    """Run a step of the derivatives by keys and values, summed over all heads of a group."""
    step = _Step(settings, steps, refs)
    *given, to_k, to_v, of_keys, of_values = step.arrays
    q, cotangent = given[:2]
    head = pl.program_id(2)

    @step.on(FIRST, head == 0)
    def _() -> None:
        of_keys[...] = jnp.zeros_like(of_keys)
        of_values[...] = jnp.zeros_like(of_values)

    @step.add
    def _(part: _Part) -> None:
        weights, gradient = _pulled(part, given)
        of_keys[part.keys, :] += narrow_product(gradient, q[part.queries, :])
        of_values[part.keys, :] += narrow_product(weights, cotangent[part.queries, :])

    @step.on(LAST, head == pl.num_programs(2) - 1)
    def _() -> None:
        to_k[...] = of_keys[...].astype(to_k.dtype)
        to_v[...] = of_values[...].astype(to_v.dtype)
