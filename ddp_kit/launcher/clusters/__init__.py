"""Environments that run one job on several nodes: the meaning of their variables, and their job files.

One module per environment. Each has `read(env)`, which turns variables into a `JobPlace`, or `job_file(request)`,
which turns a request into the text that the engine accepts, or both. `recognition.py` tries all `read` functions in
turn; `engines.py` lists the engines that `ddpkit submit --on` accepts.
"""
