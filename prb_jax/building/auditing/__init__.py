"""People judge pairs on a local page: blind, in random order, several of them at once; and how much they agree."""
