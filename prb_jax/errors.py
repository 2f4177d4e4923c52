"""The errors a user can cause. Each message names the place, what was found and what was expected.

The command line prints these as one line and exits with status 2; anything else is a bug and
keeps its traceback.
"""


class PrbError(Exception):
    """Base of every error that bad input or an impossible request can raise."""


class DataError(PrbError):
    """A record, file or field of comparison data that cannot be used."""


class CheckpointError(PrbError):
    """A model folder, configuration, tokenizer or weight file that cannot be used."""


class MeshError(PrbError):
    """A device mesh that cannot be built, or an array that it does not divide."""


class RunError(PrbError):
    """An output folder that cannot be written, or that belongs to another run."""
