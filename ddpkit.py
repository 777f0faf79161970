"""The project and its command are called ddpkit; this module says so to those who import it."""

raise ImportError("the package is called ddp_kit: write `from ddp_kit import Trainer, TrainerConfig`", name="ddpkit")
