"""The command `ddpkit`.

main.py runs each command. The other modules are commands that have no folder of their own; those that have one are
`ddpkit doctor` and `env` (doctor/), `rehearse` (rehearsal/), `report` (report/) and `top` (watching/).
"""
