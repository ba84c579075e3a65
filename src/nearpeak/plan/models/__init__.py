"""Models: their shape, weights and FLOPs, from a catalogue or a config."""
