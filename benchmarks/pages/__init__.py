"""Writers of pages of docs/ from the files in benchmarks/results."""
