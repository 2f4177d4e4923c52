"""Options of the feature store, apart from the store: `prb VERB --help` needs no NumPy for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prb_jax.errors import RunError
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.options import Options, option, section
from prb_jax.text.view import ViewOptions

DTYPES: Final = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(Options, error=RunError):
    """Options of features: how to open the model, what it reads (never a profile), and what to write.

    Raises:
      RunError: If ``store`` is unknown, or the number of posts is below 0.
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
