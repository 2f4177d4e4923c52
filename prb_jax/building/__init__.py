"""Build a personalised benchmark: pairs of answers from people's own wishes, and gates that test it for faults."""
