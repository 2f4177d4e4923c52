"""Run folders: identity, append-only rows, atomic writes, progress."""
