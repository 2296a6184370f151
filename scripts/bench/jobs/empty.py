"""Nothing: what is left is the cost of the launcher and of one interpreter."""
