"""Trees (one prefix, K responses), their token-space split, packed streams, and sequences."""
