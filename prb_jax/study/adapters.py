"""Adapters of a backbone for groups of people, trained with the step of `prb train` on some comparisons at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from prb_jax.errors import RunError
from prb_jax.models.lora_config import LoraConfig
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.models.vocabulary_heads import is_one_row
from prb_jax.personal.few_shot.choices import Adapter, AdapterTrainer
from prb_jax.personal.few_shot.lora import AdapterSettings
from prb_jax.records.comparison import Comparison
from prb_jax.records.items import Held
from prb_jax.study.embedder import AdaptedRewards, StateFeatures, check_trainable, open_embedder
from prb_jax.text.view import ViewOptions
from prb_jax.training.config import BatchSettings, OptimizerSettings, TrainSettings
from prb_jax.training.data import Examples, Order
from prb_jax.training.start import start_from
from prb_jax.training.train import reward_trainer

TRAINED_WITH = ("dtype", "revision", "tokenizer", "chat_template", "mesh")
"""Options of loading that also apply to training."""


@dataclass(eq=False)
class TrainableBackbone:
    """A decoder and the responses of a study; see :class:`prb_jax.personal.few_shot.choices.Backbone`."""

    model: str  # folder or hub id
    loading: LoadOptions  # how the model is opened
    view: ViewOptions  # protocol and length limit, same as for the features
    # R comparisons with one response each, in the order of the feature rows
    answers: Sequence[Comparison] = field(repr=False)
    mesh: Mesh  # devices

    def trainer(
        self, pairs: np.ndarray, *, settings: AdapterSettings, steps: int, seed: int
    ) -> AdapterTrainer:
        """Implements :class:`prb_jax.personal.few_shot.choices.Backbone`: one compiled step trains all adapters in
        turn. Raises RunError if the loss or its gradient is not finite."""
        comparisons = Held(
            Comparison(
                id=f"choice {number}",
                prompt=self.answers[chosen].prompt,
                responses=[self.answers[row].responses[0] for row in (chosen, rejected)],
                labels=[1.0, 0.0],
            )
            for number, (chosen, rejected) in enumerate(pairs.tolist())
        )
        if unknown := [name for name in self.loading.given if name not in TRAINED_WITH]:
            raise RunError(f"{', '.join(unknown)}: adapters cannot be trained so: leave it out")
        embedder, out = self._embedder, Path(self.model)
        given = {name: value for name, value in self.loading.given.items() if name not in ("mesh", "dtype")}
        wanted = TrainSettings(
            model=self.model,
            steps=steps,
            seed=seed,
            dtype=embedder.model.dtype,  # pyright: ignore[reportArgumentType]
            tuning="lora",
            max_length=embedder.view.max_length,
            init_head=not (embedder.gives_rewards and is_one_row(embedder.model.decoder.head)),
            optimizer=OptimizerSettings(learning_rate=settings.rate or None),
            lora=LoraConfig(rank=settings.rank, alpha=settings.alpha),
            batch=BatchSettings(comparisons=settings.batch),
            **given,
        )
        trainer = reward_trainer(
            wanted, start_from(wanted, comparisons, out=out), mesh=self.mesh, data=comparisons, out=out
        )
        trainer.plan(
            trainer.encode(Examples(comparisons, comparisons)), Order(len(comparisons), settings.batch, seed)
        )

        def train(members: np.ndarray, start: Adapter | None = None) -> Adapter:
            if start is None:
                trainer.begin_anew()
            else:
                trainer.begin_from(start)
            order, finite = Order(len(members), settings.batch, seed), []
            for step in range(steps):
                finite.append(trainer.step(trainer.batch(members[order.step(step)], step=step))["finite"])
            if not all(float(np.asarray(one)) for one in finite):
                raise RunError(
                    f"{trainer.start.name}: the loss of an adapter or its gradient is not finite; a lower rate "
                    "(as in --set lora.rate=1e-4) or dtype=float32 may help"
                )
            return trainer.trained()

        return train

    def rewards(self, adapters: Adapter, *, settings: AdapterSettings) -> np.ndarray:
        """Implements :class:`prb_jax.personal.few_shot.choices.Backbone`."""
        adapted = AdaptedRewards(self._embedder, adapters, settings.scale)
        return adapted.answers(self.answers, advance=lambda done, tokens: None).features

    @cached_property
    def _embedder(self) -> StateFeatures:
        return check_trainable(open_embedder(self.model, self.loading, view=self.view))
