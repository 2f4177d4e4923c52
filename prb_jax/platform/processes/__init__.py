"""A job of several processes: they start and end together, and agree on what they compute."""
