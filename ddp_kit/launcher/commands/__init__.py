"""The commands of `ddpkit`, one module each: parse the arguments, do the work, return the exit code."""
