"""What is done to a model before it is distributed: precision, float8, compilation, activation checkpointing."""
