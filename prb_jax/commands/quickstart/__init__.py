"""The quickstart: train and evaluate two reward models on the generated benchmark within minutes."""

from prb_jax.commands.quickstart.command import Quickstart, quickstart
from prb_jax.commands.quickstart.recipe import Recipe, Schedule
from prb_jax.commands.quickstart.tables import quickstart_table

__all__ = ["Quickstart", "Recipe", "Schedule", "quickstart", "quickstart_table"]
