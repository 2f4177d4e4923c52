"""The options of `prb features`. No JAX is imported."""

from __future__ import annotations

from dataclasses import dataclass

from prb_jax.data.options import Options, option, section
from prb_jax.errors import RunError
from prb_jax.personal.features import DTYPES
from prb_jax.readouts.load_options import LoadOptions
from prb_jax.text.view import ViewOptions


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(Options, error=RunError):
    """How features are made: how the model is opened, what it reads (never a profile), and what is written.

    Raises:
      RunError: another ``store``, or fewer than 0 posts.
    """

    store: str = option("float32", "numbers of the files", choices=DTYPES)
    responses_alone: bool = option(False, "an encoder of texts reads each response without its prompt")
    view: ViewOptions = section(ViewOptions)
    profile_posts: int = option(
        0,
        "a reward model also scores each response with the first N posts of the profile before its prompt",
        least=0,
    )
    loading: LoadOptions = section(LoadOptions)
    file_rows: int = option(4096, "texts of a file, which `--part` shares out whole", least=1)
