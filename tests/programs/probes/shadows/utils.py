"""A module of the user that has the name of another."""

MARK = "the one next to the script"
