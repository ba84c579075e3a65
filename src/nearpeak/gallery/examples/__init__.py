"""The worked examples: one module each."""
