"""The kernels of nearpeak beside everything that a user could call instead; their tuner, counters and sanitizer."""
