"""What runs, as plain data without torch: ops and traces, tensors, the work and the cost of an op, and the cost formulas."""
