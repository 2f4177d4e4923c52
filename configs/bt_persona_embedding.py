"""A persona-conditioned reward model: a learned soft prompt for each user, and one for all others.

    prb train configs/bt_persona_embedding.py model=PATH data=FILE --out runs/persona_embedding

`tuning=head`, `tuning=lora` or `tuning=full` (here) says what is trained beside the soft prompts. Users
are recognised by `user_id`; one that was not trained on gets the generic soft prompt, and is counted.
Expected: above `configs/bt_user_blind.py` for the users trained on, equal to it for others.
"""

from ml_collections import ConfigDict

from prb_jax.training.config import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.method = "persona_embedding"
    config.tuning = "full"
    config.loss.user_weights = True
    # Users that are held out whole could only be validated with the generic soft prompt.
    config.validation.by = "id"
    return config
