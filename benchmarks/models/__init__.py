"""Models of `transformers`: profiles, the fixes that findings propose, and generation."""
