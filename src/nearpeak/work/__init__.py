"""What operations must do at the least: FLOPs and bytes, as plain data."""
