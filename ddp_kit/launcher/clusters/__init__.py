"""Environments in which several nodes run one job: what their variables say, and the job files they take.

One module per environment. Each has `read(env)`, from its variables to a `JobPlace`, or `job_file(request)`, from a
request to the text that the engine takes, or both. `recognition.py` tries all `read` functions in turn; `engines.py`
names what `ddpkit submit --on` accepts.
"""
