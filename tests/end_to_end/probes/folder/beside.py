"""A module beside the one that is run."""
