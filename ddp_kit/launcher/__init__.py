"""The launcher, which no other part of ddpkit imports.

Data flow: command line and environment -> LaunchSpec -> Plan -> agent -> verdict.
"""
