"""`python -m ddp_kit` is the command `ddpkit`."""

import sys

from ddp_kit.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
