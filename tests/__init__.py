"""The tests of ddpkit. tests/support has what several of them use, tests/programs the scripts that they start."""
