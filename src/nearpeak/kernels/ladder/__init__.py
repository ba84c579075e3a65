"""A ladder of matrix products, from one thread for each number to what the vendor ships, with the traffic of each rung.

Every rung computes a @ b of bfloat16 with sums in float32, both matrices with rows next to each other in memory. What
makes one faster than the one below is that fewer bytes go from memory into a processor for each operation, until the
tensor cores are the limit. How many bytes that are follows from the tile that shares them: see `rung`. The rungs are in
`rungs.RUNGS`, one file each, and `benchmarks/ladder.py` runs them and holds predictions against counters.
"""
