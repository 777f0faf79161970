"""Cluster environments and engines: one file with one class each.

engine.py      the interface: `Environment.recognise(env)`, and `Engine` with `check`, `text` and `submit`
engines.py     the list of all of them
request.py     what they return and receive: `JobPlace` and `Request`
pods.py        the parts of manifests that the engines of Kubernetes share
ray_driver.py  the program that runs inside a Ray job
"""
