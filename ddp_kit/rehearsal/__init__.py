"""A rehearsal shows whether a resumed run of a script is the same run.

command.py    launches the script several times, undisturbed and disturbed
watch.py      in each worker: records every optimizer step, sends the disturbance, ends the run
guard.py      ends a worker before it writes to a file outside of the rehearsal
lines.py      what the watch is told and what it records
compare.py    finds the step from which two recordings differ, and in what
"""
