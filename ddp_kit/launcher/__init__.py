"""The launcher: it starts and watches processes. Nothing in the workers imports it.

Data flow: command line and environment -> LaunchSpec -> Plan -> agent -> verdict.

    spec.py         the command line (`LaunchSpec`)
    rendezvous.py   where the nodes of the job meet; program.py: what the workers run
    plan.py         everything that this node will do (`Plan`)
    job.py          the state machine of a job on all its nodes, without I/O
    agent/          one node's part of the job; warm/: the process that imports torch once and forks the workers
    output.py       the workers' output; diagnosis.py: hints from what a failed worker has printed
    verdict.py      which worker failed first and why; record.py: files for `ddpkit top` and `ddpkit report`
    function.py     `ddp_kit.launch`, which calls a function in one process per GPU
    processes.py    children and orphans, read from /proc; wire.py: messages between processes, as JSON
"""
