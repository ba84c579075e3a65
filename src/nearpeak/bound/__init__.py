"""Work on a machine: the time that the hardware allows. Pure arithmetic."""
