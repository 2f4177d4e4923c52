"""A backbone with adapters of groups of people as a source of features: the reward under each adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from prb_jax.data.comparison import Comparison
from prb_jax.errors import RunError
from prb_jax.models.lora import merge_lora
from prb_jax.personal.few_shot.backbone import Adapter
from prb_jax.scoring.embedder import Advance, Embedded, Embedder, StateFeatures


@dataclass(frozen=True, eq=False)
class AdaptedRewards:
    """The rewards of C adapters, one forward pass for each.

    An adapter is merged into a copy of the weights, in their dtype, while its rewards are computed.

    Attributes:
      base: the backbone as it is.
      adapters: trees with the factors under "layers" and the head under "score".
      scale: of the updates, alpha / rank.
    """

    base: StateFeatures = field(repr=False)
    adapters: Sequence[Adapter] = field(repr=False)
    scale: float

    gives_rewards = False

    @property
    def name(self) -> str:
        """The folder or hub id of the backbone."""
        return self.base.name

    @property
    def width(self) -> int:
        """C."""
        return len(self.adapters)

    def identity(self) -> dict[str, Any]:
        """As of :class:`Embedder`: that of the backbone."""
        return self.base.identity()

    def answers(self, comparisons: Sequence[Comparison], *, advance: Advance) -> Embedded:
        """As of :class:`Embedder`: float32 [n, C]."""
        found, truncated = np.empty((len(comparisons), self.width), np.float32), 0
        for number, (head, embedder) in enumerate(self._adapted()):
            last = number == self.width - 1
            embedded = embedder.answers(comparisons, advance=advance if last else lambda done, tokens: None)
            found[:, number] = embedded.features @ head
            truncated = embedded.truncated
        return Embedded(found, truncated)

    def posts(self, texts: Sequence[str], *, advance: Advance) -> Embedded:
        """As of :class:`Embedder`: zeros, since methods on adapters read no posts."""
        return Embedded(np.zeros((len(texts), self.width), np.float32), 0)

    def shown(
        self, comparisons: Sequence[Comparison], *, profile_posts: int, advance: Advance
    ) -> tuple[np.ndarray, int]:
        """Refused: adapters are trained without profiles."""
        raise RunError(f"{self.name}: adapters of people were trained without profiles")

    def _adapted(self) -> Iterator[tuple[np.ndarray, StateFeatures]]:
        """The head, float32 [D], and the backbone with the weights of each adapter."""
        params = self.base.model.params
        for adapter in self.adapters:
            factors = {name: jax.numpy.asarray(leaf) for name, leaf in adapter["layers"].items()}
            merged = merge_lora({**params, "layers": {**params["layers"], **factors}}, scale=self.scale)
            model = replace(self.base.model, params=merged)
            yield np.asarray(adapter["score"], np.float32)[:, 0], replace(self.base, model=model)


def check_trainable(embedder: Embedder) -> StateFeatures:
    """Return the backbone that adapters fit on.

    Raises:
      RunError: it is an encoder, or its weights are quantised.
    """
    if not isinstance(embedder, StateFeatures) or not hasattr(embedder.model.config, "num_key_value_heads"):
        raise RunError(f"{embedder.name}: is an encoder; adapters of people need a decoder")
    if embedder.model.quantize is not None:
        raise RunError(
            f"{embedder.name}: quantize: adapters are trained on weights that are not quantised: leave it out"
        )
    return embedder
