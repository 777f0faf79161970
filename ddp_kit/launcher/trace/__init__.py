"""Analysis of torch.profiler traces: trace -> TraceSummary -> findings in words."""
