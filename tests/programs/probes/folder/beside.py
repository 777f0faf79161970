"""A module next to the one that is run."""
