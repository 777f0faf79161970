"""The warm start: a server imports torch once, concurrently with the launcher, and forks the workers.

    launcher                        server                          worker
    client.WarmServer()       --->  import torch
    .start()     ------Start----->  fork if possible          --->  setsid, streams, environment, threads
                 <----Started-----                                  runs the script (worker.run_as_main)
                 <-----Ended------  wait status             <---    ends

    messages.py        what the launcher and the server send each other
    scan.py            whether a program can be forked; imports.py: what is imported once; traces.py: what imports leave
    kept_process.py    the kept process of --keep-warm; kept_client.py hands launches over to it
    facts.py, looks.py what must be equal for that

The launcher and the server communicate over a socketpair that the server inherits. When the launcher ends, the server
reads end-of-file. docs/launching.md lists the differences from plain Python that a script can see.
"""
