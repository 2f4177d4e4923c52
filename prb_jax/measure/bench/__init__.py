"""`prb bench`: how fast a model scores, trains, loads or ranks on this machine, beside the usual way."""
