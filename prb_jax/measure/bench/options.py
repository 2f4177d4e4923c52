"""Options of `prb bench`; each of its verbs uses some of them. JAX is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prb_jax.models import DTYPES, REMAT, REMAT_POLICIES
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.records.options import option, same_option
from prb_jax.training import TUNINGS, Tuning

RIVALS = {
    "against_responses": "transformers-cached",
    "against_pairs": "trl",
    "against_prompts": "transformers",
    "against_rows": "trl",
    "against_users": "transformers",
}
"""Options for a single rival, with the rival that `against` must name."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of a benchmark: model and devices, sizes of the work, and the library to compare with."""

    model: str = ""
    dtype: str | None = option(None, "Type of the weights (default: the checkpoint's)", choices=DTYPES)
    mesh: str | None = option(None, "Mesh axes, e.g. fsdp=4,tensor=2", "AXES")
    attention: str = same_option(LoadOptions, "attention")
    quantize: str | None = same_option(
        LoadOptions, "quantize", meaning="Add a second row with the layers' matrices in eight bits"
    )
    rounds: int = option(3, "Rounds; each runs both sides once", least=1)
    against: str | None = option(None, "")

    pairs: int | None = option(None, "", least=1)
    prefix_tokens: int = option(2000, "Mean length of the prefix in tokens", least=1)
    response_tokens: int = option(130, "Mean length of a response in tokens", least=1)
    batch_tokens: int | None = option(None, "Approximate tokens per stream", least=1)
    responses: tuple[int, ...] = option((2,), "Responses per comparison", "K ...", least=1)
    questions_per_user: tuple[int, ...] = option(
        (1,), "Comparisons with the same profile, e.g. 1,5,15", "N,...", least=1
    )
    against_sequences: int = option(
        16,
        "Conversations per round for padded batches; the rate is extrapolated to the rest",
        least=1,
    )
    against_responses: int | None = option(
        None,
        "Most responses in a padded batch of transformers-cached (default: all of a comparison); each has a "
        "copy of the prefix's keys and values",
        least=1,
    )

    tuning: Tuning = option("full", "Trained weights", choices=TUNINGS)
    remat: str = option(REMAT, "Activations that our backward pass recomputes", choices=REMAT_POLICIES)
    against_pairs: int | None = option(
        None, "Pairs per microbatch of TRL (default: 2 on CPUs, 8 on GPUs)", least=1
    )
    training: bool = option(False, "Also compare the loss of a training step")

    prompts: int = option(4, "Prompts per batch", least=1)
    prompt_tokens: int = option(2000, "Approximate tokens of a prompt", least=1)
    new_tokens: int = option(128, "Most new tokens of a text", least=1)
    samples: int = option(1, "Texts per prompt, one number or several", "N ...", least=1)
    temperature: float = option(1.0, "Sampling temperature; 0 is greedy, for one sample", "T")
    candidates: int = option(10, "Candidates tried per token", "C", least=1)
    against_prompts: int | None = option(
        None,
        "Prompts per round for transformers; rates are compared (default: all)",
        least=1,
    )
    against_rows: int | None = option(
        None,
        "Rollouts per microbatch of TRL (default: 4 on CPUs, 16 on GPUs)",
        least=1,
    )

    clients: int = option(500, "Concurrent clients", least=1)
    seconds: int = option(30, "Most seconds of requests", "S", least=1)
    order: str = option("random", "Order of the requested comparisons", choices=("random", "user"))

    data: str | Path = option("", "Comparisons with profiles", "FILE")
    users: int | None = option(None, "Rank only the first N users with a profile (default: all)", least=1)
    against_users: int | None = option(
        None,
        "Users per round for transformers (default: 2); the rate is extrapolated to the rest",
        least=1,
    )
