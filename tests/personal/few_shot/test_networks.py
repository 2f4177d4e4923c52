"""Networks: their arrays lie as fitted folders hold them, and come back from there whatever lies beside them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from prb_jax.models.checkpoints.array_folder import flat_arrays
from prb_jax.personal.few_shot import gpo, pal, user_embedding, vpl
from prb_jax.personal.few_shot.networks import MLP, Network, arrays_of

FEATURES = 3


def layers(count: int, *names: str) -> set[str]:
    return {f"{name}/{place}/{part}" for name in names for place in range(count) for part in "wb"}


def linear(*names: str) -> set[str]:
    return {f"{name}/{part}" for name in names for part in "wb"}


GPO_LAYER = ("query", "key", "value", "out", "up", "down")
NETWORKS: dict[str, tuple[type[Network], Any, set[str]]] = {
    "vpl": (
        vpl.Variational,
        vpl.VPLSettings(latent=2, hidden=4),
        layers(3, "encoder", "reward") | linear("query", "key", "value", "mean", "logvar"),
    ),
    "gpo": (
        gpo.Transformer,
        gpo.GPOSettings(width=4, layers=2, heads=2, embedding=12),
        {"scale", "null"}
        | layers(12, "embed")
        | linear("head", *(f"layers/{place}/{name}" for place in range(2) for name in GPO_LAYER)),
    ),
    "pal": (pal.IdealPoints, pal.PALSettings(width=4), {"prototypes", "log_scale"} | layers(2, "map")),
    "pal of_prompt": (
        pal.IdealPoints,
        pal.PALSettings(width=4, of_prompt=True),
        {"log_scale"} | layers(2, "map", "prototypes"),
    ),
    "user_embedding": (
        user_embedding.Conditioned,
        user_embedding.UserEmbeddingSettings(hidden=4),
        {"generic"} | layers(3, "network"),
    ),
    "user_clusters": (
        user_embedding.Conditioned,
        user_embedding.UserClustersSettings(hidden=4),
        {"generic", "clusters"} | layers(3, "network"),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_arrays_lie_as_in_fitted_folders_and_make_the_same_network(name: str) -> None:
    kind, settings, places = NETWORKS[name]
    rng = np.random.default_rng(0)
    arrays = arrays_of(kind(rng.normal(size=FEATURES).astype(np.float32), settings, rng))
    flat = flat_arrays(arrays)
    assert flat.keys() == {"direction"} | places
    # Each leaf is told from every other one, those of layers 2 and 10 too.
    told = {
        place: np.full(np.shape(leaf), number, np.float32)
        for number, (place, leaf) in enumerate(flat.items())
    }
    tree = jax.tree.unflatten(jax.tree.structure(arrays), list(told.values()))
    beside = {"people": np.zeros((2, 2), np.float32), "mean": np.zeros(2, np.float32)}
    other_order = dict(reversed({**beside, **tree}.items()))
    again = flat_arrays(arrays_of(kind.of(other_order, settings)))
    assert again.keys() == told.keys()
    for place, leaf in told.items():
        np.testing.assert_array_equal(again[place], leaf, err_msg=place)


def test_an_array_that_is_missing_is_named() -> None:
    kind, settings, _ = NETWORKS["vpl"]
    arrays = arrays_of(kind(np.zeros(FEATURES, np.float32), settings, np.random.default_rng(0)))
    del arrays["encoder"][1]["b"]
    with pytest.raises(KeyError, match="encoder/1/b"):
        kind.of(arrays, settings)


def test_an_mlp_has_no_activation_behind_its_last_layer() -> None:
    rng = np.random.default_rng(0)
    network, rows = MLP([2, 5, 1], np.tanh, rng=rng), rng.normal(size=(4, 2)).astype(np.float32)
    first, last = ({name: np.asarray(getattr(layer, name)[...]) for name in "wb"} for layer in network)
    expected = np.tanh(rows @ first["w"] + first["b"]) @ last["w"] + last["b"]
    np.testing.assert_allclose(network(rows), expected, rtol=1e-6)
