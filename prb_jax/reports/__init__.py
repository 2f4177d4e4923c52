"""Tables for readers, made from summaries."""
