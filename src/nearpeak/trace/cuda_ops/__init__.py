"""The ops that torch's CUDA build would run, for code that runs on fake CPU tensors."""
