"""`python -m ddp_kit` is the command `ddpkit`."""

from ddp_kit.launcher.cli import entry

if __name__ == "__main__":
    entry()
