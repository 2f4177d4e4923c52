"""The model of the tests of `scoring`, for those of sweeps and features."""

from tests.scoring.conftest import folder, model

__all__ = ["folder", "model"]
