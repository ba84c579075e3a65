"""Where the time of a step goes: measured times against bounds. Plain data and arithmetic, no torch."""
