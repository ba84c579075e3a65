"""A profiled step as plain data, the file that it is saved to, and figures derived from it. No torch."""
