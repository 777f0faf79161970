"""The command `ddpkit`.

main.py runs a command of the table in commands.py. Most other modules are commands that have no folder of their own.
Those that have one are `ddpkit doctor` and `env` (doctor/), `rehearse` (rehearsal/), `report` (report/) and `top`
(watching/).

    main.py        the entry point: the signals until a command runs, and the exit code
    commands.py    the table of commands
    launch.py      `ddpkit launch`; dry_run.py: what --dry-run prints
    stopped.py     stop signals that arrive before a job is running
    completion.py  `ddpkit --print-completion`
"""
