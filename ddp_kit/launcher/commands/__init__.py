"""The commands of `ddpkit`."""
