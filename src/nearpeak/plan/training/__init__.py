"""Training: layouts, memory, the time of a step, and the search for the best."""
