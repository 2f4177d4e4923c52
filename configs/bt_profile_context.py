"""A persona-conditioned reward model: the user's profile stands in the prompt.

    prb train configs/bt_profile_context.py model=PATH data=FILE --out runs/profile_context

`tuning=head`, `tuning=lora` or `tuning=full` (here). Both answers share the long prefix in the forward
and in the backward pass. Expected: on data whose labels depend on the user, clearly above
`configs/bt_user_blind.py`, also for users that were never trained on.
"""

from ml_collections import ConfigDict

from prb_jax.training.config import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.method = "profile_context"
    config.profile_posts = 10
    config.tuning = "full"
    config.loss.user_weights = True
    return config
