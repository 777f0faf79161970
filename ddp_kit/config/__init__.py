"""The settings of a run.

settings.py          `TrainerConfig`: the fields, their checks and the messages for wrong ones
combinations.py      settings that cannot be combined
other_frameworks.py  answers to other frameworks' names of settings
types.py             generated: the types that each setting accepts
"""
