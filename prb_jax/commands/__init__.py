"""The verbs of the command line: one file a verb, which parses and calls."""
