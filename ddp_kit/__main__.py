"""Entry point of `python -m ddp_kit`, which is the same as the command `ddpkit`."""

from ddp_kit.cli.main import entry

if __name__ == "__main__":
    entry()
