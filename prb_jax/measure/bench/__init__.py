"""`prb bench`: how fast a model scores, trains, loads or ranks on this machine, compared with common libraries."""
