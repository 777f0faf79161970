"""`ddpkit doctor` and `ddpkit env`: whether this machine can train, and what it has.

command.py       `ddpkit doctor`: runs the checks and prints their results
checks.py        the checks: each is a function that returns a result, with the command that fixes a fault
object_store.py  the checks of `--dir URL`
machine.py       facts about this machine
probe.py         the program that tests torch, in a process of its own
environment.py   `ddpkit env`
"""
