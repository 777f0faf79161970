"""Scripts that tests start, and the values that their tests need of them."""
