"""`ddpkit report`: read the records of runs, and write findings and charts as an HTML page or as pictures."""
