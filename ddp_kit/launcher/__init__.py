"""The launcher. Apart from `ddp_kit/__main__.py`, no other part of ddpkit imports it.

Data flow: command line and environment -> LaunchSpec -> Plan -> agent -> verdict.
"""
