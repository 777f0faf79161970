"""The warm start: a server imports torch once, at the same time as the launcher, and forks the workers from it.

    launcher                        server                          worker
    client.WarmServer()       --->  import torch
    .fork(Start) ------Start----->  nothing in the way? fork  --->  close, setsid, environment, streams, threads
                 <----Started-----                                  becomes the script (script.become)
                 <-----Ended------  wait status             <---    ends

The two ends share an inherited socketpair; its end of file tells the server that the launcher is gone.
The few things that a script sees differently from plain python are listed in docs/launching.md.
"""
