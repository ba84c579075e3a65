"""The seam between nearpeak and the vendors of devices.

Everything that differs by vendor is behind one interface, `Backend` in `device.py`: which devices there are and what
they are, events, graphs and delays on them, what torch's profiler calls their kernels, their clocks, power and
throttling, their memory. `nvidia.py`, `amd.py` and `cpu.py` implement it, and `backends.py` finds the one that a torch
device belongs to. `nvml.py` asks NVIDIA's driver, without torch.

To support another vendor, write one module with a subclass of `GpuBackend`, add it to the table in `backends.py`, and
add its devices to `machines/catalogue.toml`.
"""
