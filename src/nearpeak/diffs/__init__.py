"""What changed between two profiles, and whether the change is significant. No torch."""
