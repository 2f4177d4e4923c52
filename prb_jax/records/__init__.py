"""The record and where it is read from: ``comparison``, ``sources`` and the generated ``personas``."""
