"""Executed operations as plain data, without torch: ops, traces, tensors, work, costs and the cost formulas."""
