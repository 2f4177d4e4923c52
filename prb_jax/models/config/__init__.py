"""Configurations of decoders and encoders, parsed from ``config.json``."""
