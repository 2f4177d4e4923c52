"""Attention over streams by the kernel for paged caches: its arguments, computed by JAX's own reference of the kernel,
against the mask written out; and the program compiled for TPUs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    dynamic_validate_inputs,
    ref_ragged_paged_attention,
)

from prb_jax.errors import CheckpointError, MeshError
from prb_jax.models.attention import paged
from prb_jax.models.attention.choice import choose_attention, stream_attention_name
from prb_jax.models.attention.paged import kernel_arguments, paged_attention
from prb_jax.plan.chips import describe_slice
from prb_jax.plan.planner import _nothing_kept
from prb_jax.readouts.score_tree import score_stream, score_tree
from prb_jax.sharding import make_mesh, partition_spec
from prb_jax.trees.packing import StreamOptions, StreamShape, pack_streams
from prb_jax.trees.stream_tables import PageTable, most_sequences, page_size, page_table
from prb_jax.trees.streams import StreamBatch, make_stream_batch
from prb_jax.trees.tree import build_tree
from tests.models.attention.kernel_on_mesh import devices
from tests.models.attention.test_blockwise import FLOAT32_TOLERANCE, jit
from tests.training.small_batches import batch_of, initial_params, random_trees, small_config
from tests.trees.forests import Forest, random_forest

TOKENS = 1152


def by_pages(arguments: Sequence[Any], window: int | None, softcap: float | None) -> np.ndarray:
    """The kernel's contract, in float64: each sequence's queries are the last of its keys, and see no later ones."""
    q, pages, lengths, of_sequence, starts, count = (np.asarray(x) for x in arguments)
    found = []
    for sequence in range(count[0]):
        queries = q[starts[sequence] : starts[sequence + 1]].astype(np.float64)
        both = (
            pages[of_sequence[sequence]].reshape(-1, *pages.shape[2:])[: lengths[sequence]].astype(np.float64)
        )
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (both[:, 0::2], both[:, 1::2]))
        back = np.arange(len(k) - len(queries), len(k))[:, None] - np.arange(len(k))
        seen = (back >= 0) & (back < (len(k) if window is None else window))
        found.append(attend(queries, k, v, seen, softcap))
    return np.concatenate(found)


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, softcap: float | None
) -> np.ndarray:
    scores = np.einsum("tnh,snh->nts", q, k)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores, -1e30)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("nts,snh->tnh", weights / weights.sum(axis=-1, keepdims=True), v)


def drawn(seed: int, heads: int, kv_heads: int) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.normal(size=(TOKENS, n, 48)), jnp.float32) / 2 for n in (heads, kv_heads, kv_heads)
    ]


def table_of(forest: Forest, runs: int) -> PageTable:
    return PageTable(**page_table(forest.previous, forest.positions, forest.used, runs=runs))


@pytest.mark.parametrize(
    ("seed", "longest", "heads", "kv_heads", "window", "softcap"),
    [(0, 150, 4, 2, None, None), (1, 40, 2, 2, 50, None), (2, 90, 4, 1, 7, 3.0), (3, 700, 1, 1, 1000, None)],
)  # fmt: skip
def test_equals_the_mask_written_out(
    seed: int, longest: int, heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    forest = random_forest(seed, tokens=TOKENS, longest=longest)
    q, k, v = drawn(seed, heads, kv_heads)
    found = by_pages(kernel_arguments(q, k, v, table_of(forest, forest.leaves + 3)), window, softcap)
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    group = heads // kv_heads
    k, v = (np.repeat(x, group, axis=1) for x in wide[1:])
    expected = attend(wide[0], k, v, forest.sees(window), softcap)[: forest.used]
    assert len(found) == forest.used
    np.testing.assert_allclose(found[..., :48], expected, atol=FLOAT32_TOLERANCE, rtol=0)
    assert (found[..., 48:] == 0).all()


def test_jaxs_reference_of_the_kernel_agrees() -> None:
    forest = random_forest(4, tokens=TOKENS, longest=300)
    q, k, v = drawn(0, 2, 1)
    q, pages, *of_table = kernel_arguments(q, k, v, table_of(forest, forest.leaves + 1))
    table: list[Any] = [np.asarray(x) for x in of_table]
    dynamic_validate_inputs(q, pages, *table, sliding_window=100, soft_cap=3.0)
    # Its loop over sequences is one of Python.
    run = jit(lambda q, pages: ref_ragged_paged_attention(q, pages, *table, sliding_window=100, soft_cap=3.0))
    found = run(q, pages)
    np.testing.assert_allclose(found, by_pages((q, pages, *table), 100, 3.0), atol=FLOAT32_TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_compiles_for_tpus(topology: str) -> None:
    """8B shapes, 8,192 tokens with up to 64 conversations a stream, bfloat16: heads split in two, streams in two."""
    pytest.importorskip("libtpu")
    mesh = make_mesh("data=2,tensor=2", devices=describe_slice(topology).devices)
    tokens, runs = 8192, 64
    page, most = page_size(tokens, runs), most_sequences(tokens, runs)

    def array(*shape: int, axes: tuple[str | None, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
        place = jax.sharding.NamedSharding(mesh, partition_spec(axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    q, k = (array(2, tokens, n, 128, axes=("batch", None, "heads"), dtype="bfloat16") for n in (32, 8))
    table = PageTable(
        *(
            array(2, *shape, axes=("batch",))
            for shape in (
                (tokens // page + 2 * runs, page),
                (most, tokens // page),
                (most,),
                (most + 1,),
                (1,),
            )
        )  # pyright: ignore[reportArgumentType]
    )
    nothing: Any = None
    batch = StreamBatch(*[nothing] * 8, pages=table)
    run = jax.jit(functools.partial(paged_attention, window=4096, softcap=50.0, mesh=mesh))
    with _nothing_kept(), jax.set_mesh(mesh):
        text = run.lower(q, k, k, batch=batch).compile().as_text()
    assert "ragged_paged_attention_kernel" in (text or "")


@pytest.mark.parametrize("window", [None, 24])
def test_a_decoder_with_it_scores_as_over_trees(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trees that begin alike and one that does not, in one stream; every second layer with a window."""
    changes = (
        {}
        if window is None
        else {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
    )
    config = small_config(**changes)
    trees = random_trees(2)
    trees.append(build_tree([[*trees[0].prefix[:9], *ids] for ids in ([20, 21], [30], [31, 32])]))
    options = StreamOptions(tokens=128, window=window, paged=True)
    (packed,) = pack_streams(trees, StreamShape(128, 16), options)
    params = initial_params(config)

    def by_reference(
        q: jax.Array, *arguments: Any, sliding_window: int | None, soft_cap: float | None, **_: Any
    ):
        found = ref_ragged_paged_attention(q, *arguments, sliding_window=sliding_window, soft_cap=soft_cap)
        return jnp.pad(found, ((0, len(q) - len(found)), (0, 0), (0, 0)), constant_values=jnp.nan)

    monkeypatch.setattr(paged, "ragged_paged_attention", by_reference)
    batch = make_stream_batch(trees, packed, options)
    by_pages = jit(lambda params: score_stream(params, batch, config=config, dtype=jnp.dtype("float32")))
    in_buckets = jit(functools.partial(score_tree, config=config, dtype=jnp.dtype("float32")))
    ours = np.asarray(by_pages(params))[0, :, 0]
    theirs = np.asarray(in_buckets(params, batch_of(trees)))[..., 0]
    (stream,) = packed
    expected = [theirs[member, : len(trees[member].responses)] for member in stream.members]
    np.testing.assert_allclose(ours[:7], np.concatenate(expected), atol=1e-5, rtol=0)
    assert len(np.unique(ours[:7])) == 7


def chosen(
    platform: str,
    dtype: str = "bfloat16",
    wanted: str = "paged",
    heads: int = 2,
    train: bool = False,
    **shape: int,
) -> str | None:
    mesh: Any = devices(platform, **shape)
    config = small_config(num_key_value_heads=heads, num_attention_heads=heads)
    choose_attention(mesh, jnp.dtype(dtype), wanted, scored=None if train else config)
    return stream_attention_name(mesh, wanted)


def test_chosen_where_it_is_asked_for() -> None:
    for heads in (1, 2, 4, 8, 16):
        assert chosen("tpu", heads=heads) == "ragged paged kernel (Pallas) over packed streams"
    assert chosen("tpu", wanted="auto") is None
    assert chosen("gpu", wanted="auto") is None
    assert chosen("cpu", wanted="auto") == "block-wise XLA over packed streams"


def test_refused_where_it_cannot_be() -> None:
    for platform, dtype in (("cpu", "bfloat16"), ("gpu", "bfloat16"), ("tpu", "float32")):
        with pytest.raises(
            CheckpointError, match=f"'paged' is a kernel for TPUs .* found {platform} in {dtype}"
        ):
            chosen(platform, dtype)
    with pytest.raises(
        CheckpointError, match="'paged' scores packed streams alone, and has no backward pass"
    ):
        chosen("tpu", train=True)
    with pytest.raises(MeshError, match="found num_key_value_heads=6 with tensor=1"):
        chosen("tpu", heads=6)
    with pytest.raises(MeshError, match="takes whole streams, found sequence=2"):
        chosen("tpu", sequence=2)
