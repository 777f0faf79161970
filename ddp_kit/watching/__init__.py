"""`ddpkit top`: a table of the jobs and ranks that are running on this machine."""
