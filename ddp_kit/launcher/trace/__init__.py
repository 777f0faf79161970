"""A trace of torch.profiler -> TraceSummary -> findings in words."""
