"""The launcher: argv, environment -> LaunchSpec -> Plan -> agent -> verdict. No other part of ddpkit imports it."""
