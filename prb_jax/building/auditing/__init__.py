"""People judge pairs on a local page: blind, in random order, several people per pair; agreement is measured."""
