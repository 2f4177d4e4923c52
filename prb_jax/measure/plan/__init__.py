"""`prb plan`: does a model fit a TPU slice, how long would a step take, and what moves between its chips.

The real program is compiled ahead of time by libtpu, without a TPU and without weights. The time is a
roofline: the largest of

- matrix products: FLOPs that the program runs, over the chips' bfloat16 peak;
- memory: bytes that a chip's program reads and writes in main memory, over its bandwidth;
- links: bytes that a chip sends in collectives, over the bandwidth of all its links.

That is what perfect overlap and links that are all in use would give, with vector units, latencies and waiting
left out: no run is faster. The MFU is FLOPs on paper (nothing computed twice, padding none) over that time and
the chips' peak.
"""
