"""Plans: memory, speed and parallelism of models on clusters that are not there yet. Pure arithmetic, no torch."""
