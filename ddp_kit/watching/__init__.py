"""`ddpkit top`: the jobs that are running. top.py shows the table, readings.py reads it from the files of the jobs."""
