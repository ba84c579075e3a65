"""Times that can be trusted: the harness, its statistics, its quality flags, and the ceilings of a machine."""
