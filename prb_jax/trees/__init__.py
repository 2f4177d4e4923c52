"""Trees (one prefix, K responses), their token-space split, buckets of fixed shapes and batches."""
