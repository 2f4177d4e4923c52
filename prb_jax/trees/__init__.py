"""Trees (one prefix, K responses in tokens), packed streams, and plain sequences."""
