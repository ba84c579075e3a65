"""The ops of real code, recorded from a run on fake or real tensors, or read from a file of torch.profiler."""
