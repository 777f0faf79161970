"""Run as a script: the command `ddpkit` in the folder that the first argument names."""

import os
import sys

from ddp_kit.cli.main import entry

os.chdir(sys.argv.pop(1))
entry()
