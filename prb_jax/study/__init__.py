"""Methods of personalisation compared on the same people: splits, runs of each method, controls, figures."""
