"""The hub of the tests of sources."""

from tests.records.sources.conftest import hub_of

__all__ = ["hub_of"]
