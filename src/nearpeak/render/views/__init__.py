"""One module per result: each makes the `Document` that all formats are written from."""
