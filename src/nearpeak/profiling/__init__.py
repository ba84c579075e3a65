"""Runs code, profiles and traces its steps, and assembles the records into a `Profile`."""
