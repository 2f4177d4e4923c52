"""Methods that learn a person's taste from a few comparisons, over the states of a backbone: numbers alone."""
