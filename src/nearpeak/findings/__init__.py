"""Rules that find wasted time in a profiled step, and the engine that runs them. No torch."""
