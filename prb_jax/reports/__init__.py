"""Tables for people, from summaries."""
