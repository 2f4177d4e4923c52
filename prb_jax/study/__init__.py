"""Comparison of personalisation methods on the same people: splits, runs of each method, controls, figures."""
