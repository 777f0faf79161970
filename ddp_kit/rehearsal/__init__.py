"""A rehearsal shows whether a resumed run of a script is the same run.

commands/rehearse.py    launches the script several times, undisturbed and disturbed
watch.py                in each worker: records every optimizer step, sends the disturbance, ends the run
lines.py                what the watch is told and what it records
compare.py              finds the step from which two recordings differ, and in what
"""
