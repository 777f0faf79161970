"""The `ddpkit` command and those of its commands that have no folder of their own."""
