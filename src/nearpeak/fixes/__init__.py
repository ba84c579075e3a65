"""`fix`: finds what a model can compute faster, changes that model alone, proves the change, and can undo it."""
