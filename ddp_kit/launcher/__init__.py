"""The launcher: argv, environment -> LaunchSpec -> Plan -> agent -> verdict. Nothing outside this folder imports it."""
