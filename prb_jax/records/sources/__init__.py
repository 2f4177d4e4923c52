"""A name or a path becomes comparisons: files, hub data sets, benchmarks, generated personas."""
