"""A reward model that knows nothing of the user: Bradley-Terry on question and answers alone.

    prb train configs/bt_user_blind.py model=PATH data=FILE --out runs/user_blind

`tuning=head` trains the score head on a frozen backbone, `tuning=lora` low-rank updates and the head,
`tuning=full` (here) everything. Expected: the loss falls from 0.69; on data whose labels depend on the
user, validation accuracy stays where the opinion of the majority is.
"""

from ml_collections import ConfigDict

from prb_jax.training.config import default_config


def get_config() -> ConfigDict:
    """The config."""
    config = default_config()
    config.method = "user_blind"
    config.tuning = "full"
    return config
