"""One module for each family of figures; each has ``cases(options)``."""
