"""Analysis of torch.profiler traces: summarise a trace, and describe findings in words."""
