"""Scores of one checkpoint on several meshes, in a process with eight devices.

python -m tests.platform.sharding.mesh_scores FOLDER OUT [MESH...]

Writes for each of MESHES the shapes of the parameters' shards, or why it cannot be, and for each MESH (all of them,
unless some are named) the scores.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

MESHES = {
    4: "data=4 fsdp=4 fsdp=2,tensor=2 tensor=4 data=3 sequence=2,tensor=2 int8@fsdp=4 int8@fsdp=2,tensor=2",
    8: "data=2,fsdp=2,tensor=2 fsdp=4,tensor=2 default fsdp=2,sequence=4 int8-weights@fsdp=4,tensor=2",
}
"""Meshes by the number of devices that are present. "default" is none given; "int8@fsdp=4" is the mesh "fsdp=4" with
the weights quantised."""
CALLERS = ("fsdp=2,tensor=2", "fsdp=2,sequence=4")
"""Meshes of models that are also scored in a program on another mesh; the last one alone where some are named."""


def is_rounded_apart(spec: str, config: Any) -> bool:
    """Return whether the order of float32 sums before an eight-bit activation depends on the mesh: attention is over a
    part of the heads, or recurrent layers multiply matrices of a part of the streams. Then activations are written."""
    from prb_jax.models.config.family import RECURRENT

    return spec.startswith("int8@") and ("tensor" in spec or RECURRENT in config.layer_mixers)


def comparisons() -> list[Any]:
    """Of mixed lengths and numbers of responses; with and without a profile."""
    import numpy as np

    from prb_jax import Comparison

    rng = np.random.default_rng(0)
    words = ("tea", "walk", "rain", "music", "bread", "hill", "train", "letter", "garden", "soup")

    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(words, int(rng.integers(least, most))))

    return [
        Comparison(
            id=f"c{i}",
            question=text(2, 9),
            responses=[f"{k} {text(2, 30)}" for k in range(2 if i < 7 else 4)],
            labels=None,
            profile=[{"text": text(4, 25), "category": "c"} for _ in range(i % 4)],
        )
        for i in range(11)
    ]


def sha256_of_layers(params: dict[str, Any]) -> str:
    """Of all values of the layers' matrices and scales."""
    import numpy as np

    total = hashlib.sha256()
    for name, leaf in sorted(params["layers"].items()):
        total.update(name.encode() + np.ascontiguousarray(leaf).tobytes())
    return total.hexdigest()


def inexact_products(layers: dict[str, Any]) -> dict[str, int]:
    """How many numbers of a product with a quantised matrix of the first layer, as the mesh has it, are not the
    exact sum of integers times the scales, by matrix."""
    import jax
    import numpy as np

    from prb_jax.models.quantization import quantize_array, quantized_project

    inexact = {}
    for name in ("q", "o", "gate", "down"):
        weight, scale = layers[name][0], layers[f"{name}_scale"][0]
        x = np.random.default_rng(0).standard_normal((64, weight.shape[0]), np.float32)
        out = jax.jit(quantized_project, static_argnames="activations")(x, weight, scale, activations=True)
        narrow, token_scale = quantize_array(x, np.dtype(np.int8), axis=-1)
        total = narrow.astype(np.int64) @ np.asarray(weight, np.int64)
        exact = total.astype(np.float32) * token_scale[:, None] * np.asarray(scale)
        inexact[name] = int((np.asarray(out) != exact).sum())
    return inexact


def scores_and_codes(model: Any) -> dict[str, Any]:
    """The scores [B][2] of a batch of pairs, and by token a number made of all eight-bit activations that the token
    has in all layers: [B][2][tokens of the conversation, and what the read one has in the last layer besides]. Tokens
    with the same number have the same codes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from prb_jax.models import quantization

    quantize, seen = quantization.quantize_array, []

    def recording(x: Any, dtype: np.dtype, *, axis: int) -> Any:
        narrow, scale = quantize(x, dtype, axis=axis)
        factors = np.random.default_rng(0).integers(1, 2**32, x.shape[-1], np.uint32)
        number = jnp.sum(narrow.astype(jnp.uint32) * factors, axis=-1, dtype=jnp.uint32)
        # The same step in two matrices leaves a trace.
        number = (number ^ (number >> 16)) * jnp.uint32(0x7FEB352D)
        jax.debug.callback(lambda codes: seen.append(np.array(codes)), number ^ (number >> 15))
        return narrow, scale

    trees = model.encode([pair for pair in comparisons() if len(pair.responses) == 2])
    batch = model.batch(trees)
    quantization.quantize_array = recording
    try:
        # A new function: the model's own may be compiled already.
        scores = jax.jit(lambda *arguments: model.score_fn.__wrapped__(*arguments))(model.params, batch)
        jax.effects_barrier()
    finally:
        quantization.quantize_array = quantize
    scales = [leaf for name, leaf in model.params["layers"].items() if name.endswith("_scale")]
    assert len(seen) == sum(len(leaf) for leaf in scales) >= 7 * model.config.num_hidden_layers
    sizes = np.shape(batch.tokens), np.shape(batch.reads)
    of_tokens, of_reads = (sum(codes for codes in seen if codes.shape == size) for size in sizes)
    until, ends = np.asarray(batch.until), np.asarray(batch.ends)

    def codes(place: int) -> list[int]:
        """Of the conversation of a read place."""
        stream, read = divmod(place, sizes[1][1])
        end = ends[stream, read]
        path = (np.arange(sizes[0][1]) <= end) & (end < until[stream])
        return [*of_tokens[stream, path].tolist(), int(of_reads[stream, read])]

    places = np.asarray(batch.places).tolist()
    return {
        "scores": [np.asarray(scores)[row, : len(tree.responses)].tolist() for row, tree in enumerate(trees)],
        "codes": [[codes(place) for place in row] for row in places],
    }


def under_a_mesh_of_the_callers(model: Any) -> list[list[float]]:
    """Scores of three comparisons in a jitted program on a mesh with explicit axes over the same devices; gradients are
    finite."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    batch = model.batch(model.encode(comparisons()[:3]))
    mine = jax.make_mesh(
        (model.mesh.size,),
        ("mine",),
        axis_types=(jax.sharding.AxisType.Explicit,),
        devices=model.mesh.devices.flatten(),
    )

    @jax.jit
    def run(params: Any, batch: Any) -> Any:
        scores, pull = jax.vjp(lambda params: model.score_fn(params, batch), params)
        return scores + 0.0, *pull(jnp.ones_like(scores))

    with jax.set_mesh(mine):
        scores, gradient = run(model.params, batch)
    # As the parameters, gradients are on the model's mesh, which the operations of the caller's program do not take.
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradient))
    assert all(np.asarray(gradient[name]).any() for name in ("embed", "score"))
    return scores.tolist()


def main(folder: str, out: str, *scored: str) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(MESHES))

    import prb_jax as prb
    from prb_jax.commands.process import enable_compilation_cache
    from prb_jax.models.checkpoints.hf_map import flatten
    from prb_jax.platform.meshes import make_mesh

    enable_compilation_cache()

    by_mesh: dict[str, Any] = {}
    for count, spec in ((count, spec) for count, specs in MESHES.items() for spec in specs.split()):
        quantize, _, text = spec.rpartition("@")
        mesh = None if text == "default" else text
        try:
            if count < jax.device_count():
                mesh = make_mesh(mesh, devices=jax.devices()[:count])
            model = prb.load(folder, mesh=mesh, quantize=quantize or None)
        except prb.MeshError as error:
            by_mesh[spec] = {"error": str(error)}
            continue
        batch = model.batch(model.encode(comparisons()[:3]))
        by_mesh[spec] = {
            "axes": dict(model.mesh.shape),
            "sha256": sha256_of_layers(model.params),
            "batch": [list(batch.tokens.shape), list(batch.tokens.addressable_shards[0].data.shape)],
            "shards": {
                "/".join(path): [sorted({str(s.index) for s in leaf.addressable_shards}), list(leaf.shape),
                                 list(leaf.addressable_shards[0].data.shape)]
                for path, leaf in flatten(model.params).items()
            },
        }  # fmt: skip
        if not scored or spec in scored:
            by_mesh[spec] |= {
                "scores": [row.tolist() for row in model.score(comparisons(), batch_tokens=512)],
                "inexact": inexact_products(model.params["layers"]) if quantize == "int8" else {},
                "recorded": scores_and_codes(model) if is_rounded_apart(spec, model.config) else {},
                "callers": under_a_mesh_of_the_callers(model)
                if spec in (CALLERS[-1:] if scored else CALLERS)
                else [],
            }
    Path(out).write_text(json.dumps(by_mesh))


if __name__ == "__main__":
    main(*sys.argv[1:])
