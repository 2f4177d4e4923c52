"""From a model and comparisons to scores on disk: the scorer, resumable runs, evaluation, baselines."""
