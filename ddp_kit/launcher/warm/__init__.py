"""The warm start: a server imports torch once, concurrently with the launcher, and forks the workers.

    launcher                        server                          worker
    client.WarmServer()       --->  import torch
    .start()     ------Start----->  fork if possible          --->  setsid, streams, environment, threads
                 <----Started-----                                  runs the script (script.run_as_main)
                 <-----Ended------  wait status             <---    ends

Both ends use an inherited socketpair; its end of file tells the server that the launcher has ended.
docs/launching.md lists what a script sees differently from plain Python.
"""
