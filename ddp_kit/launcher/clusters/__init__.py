"""Cluster environments: each module reads the variables that one environment sets, writes its job files, or both.

`read(env)` turns environment variables into a `JobPlace`. `job_file(request)` turns a `Request` into the text of a job
file. `recognition.py` tries all `read` functions in turn; `engines.py` lists the engines (Slurm, Kubernetes, Ray, ...)
that `ddpkit submit --on` accepts.
"""
