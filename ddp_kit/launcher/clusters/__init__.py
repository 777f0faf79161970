"""Environments in which several nodes run one job: what their variables mean, and which job files they accept.

One module per environment. Each has `read(env)`, which turns variables into a `JobPlace`, or `job_file(request)`,
which turns a request into the text that the engine accepts, or both. `recognition.py` tries all `read` functions in
turn; `engines.py` names what `ddpkit submit --on` accepts.
"""
