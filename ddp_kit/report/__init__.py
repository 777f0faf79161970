"""`ddpkit report`: read the records of runs, and write findings and charts as an HTML page or as pictures.

command.py          `ddpkit report`
run_history.py      what the launcher and the Trainer recorded of a run; rows.py: its rows, by column
trace_recording.py  the events of a profiler's trace; trace_analysis.py: where the time of a step went
findings.py         advice; comparison.py: two runs side by side
page.py, charts.py  the page and its charts
"""
