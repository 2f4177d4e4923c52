"""`prb plan`: report if a model fits a TPU slice, how long a step takes at best, and the traffic between its chips.

libtpu compiles the real program ahead of time, without a TPU and without weights. The time is a roofline: the
largest of

- matrix products: FLOPs that the program runs, over the chips' bfloat16 peak;
- memory: bytes that a chip's program reads and writes in main memory, over its bandwidth;
- links: bytes that a chip sends in collectives, over the bandwidth of all its links.

The roofline assumes perfect overlap and fully used links, and ignores vector units, latencies and waiting: no run is
faster. The MFU is the analytic FLOPs (nothing computed twice, no padding) over that time and the chips' peak.
"""
