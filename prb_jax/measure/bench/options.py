"""The options of `prb bench`, of which each of its verbs takes some. No JAX is imported."""

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
"""Options of one rival only, and which one `against` must name."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is timed, and beside what: a model and its devices, the sizes of the work, the other way."""

    model: str = ""
    dtype: str | None = option(None, "default: the checkpoint's", choices=DTYPES)
    mesh: str | None = option(None, "as in fsdp=4,tensor=2", "AXES")
    attention: str = same_option(LoadOptions, "attention")
    quantize: str | None = same_option(
        LoadOptions, "quantize", meaning="a second row with the layers' matrices in eight bits"
    )
    rounds: int = option(3, "side-by-side repetitions", least=1)
    against: str | None = option(None, "")

    pairs: int | None = option(None, "", least=1)
    prefix_tokens: int = option(2000, "mean length of the prefix", least=1)
    response_tokens: int = option(130, "mean length of a response", least=1)
    batch_tokens: int | None = option(None, "tokens of a stream, about", least=1)
    responses: tuple[int, ...] = option((2,), "of a comparison", "K ...", least=1)
    questions_per_user: tuple[int, ...] = option(
        (1,), "comparisons with the same profile, as in 1,5,15", "N,...", least=1
    )
    against_sequences: int = option(
        16,
        "conversations that the padded way scores a round; its rate is carried over to the rest",
        least=1,
    )
    against_responses: int | None = option(
        None,
        "the most responses of a padded batch of transformers-cached (default: all of a comparison); each has a "
        "copy of the prefix's keys and values",
        least=1,
    )

    tuning: Tuning = option("full", "what is trained", choices=TUNINGS)
    remat: str = option(REMAT, "what our backward pass computes again", choices=REMAT_POLICIES)
    against_pairs: int | None = option(
        None, "pairs of a microbatch of TRL's (default: 2 on CPUs, 8 on GPUs)", least=1
    )
    training: bool = option(False, "also the loss of a step of training")

    prompts: int = option(4, "at a time", least=1)
    prompt_tokens: int = option(2000, "length of a prompt, about", least=1)
    new_tokens: int = option(128, "of each text, at most", least=1)
    samples: int = option(1, "texts of each prompt, one number or several", "N ...", least=1)
    temperature: float = option(1.0, "0 is greedy, for one sample", "T")
    candidates: int = option(10, "tried for each token", "C", least=1)
    against_prompts: int | None = option(
        None,
        "prompts that the usual way continues in a round; its rate is compared (default: all)",
        least=1,
    )
    against_rows: int | None = option(
        None,
        "rollouts of a microbatch of TRL's (default: 4 on CPUs, 16 on GPUs)",
        least=1,
    )

    clients: int = option(500, "at a time", least=1)
    seconds: int = option(30, "that they ask, at most", "S", least=1)
    order: str = option("random", "of the comparisons that they ask for", choices=("random", "user"))

    data: str | Path = option("", "comparisons with profiles", "FILE")
    users: int | None = option(None, "the first N users with a profile (default: all)", least=1)
    against_users: int | None = option(
        None,
        "users that the usual way ranks a round (default: 2); its rate is carried over to the rest",
        least=1,
    )
