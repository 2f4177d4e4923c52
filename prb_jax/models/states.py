"""What a head sees of a forward pass, over trees or over packed streams."""

from __future__ import annotations

from prb_jax.models.stream_states import StreamStates
from prb_jax.models.tree_states import TreeStates

States = TreeStates | StreamStates
