"""How accurate the harness is: device times beside the profiler and other harnesses."""
