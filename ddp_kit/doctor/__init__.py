"""`ddpkit doctor` and `ddpkit env`: whether this machine can train, and what it has."""
