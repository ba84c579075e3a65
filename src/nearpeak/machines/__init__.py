"""The machine model: what a processor can do, the catalogue of known processors, and which one this is."""
