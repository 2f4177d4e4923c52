"""Methods that learn a person's taste from a few comparisons. They read only a backbone's states, not text."""
