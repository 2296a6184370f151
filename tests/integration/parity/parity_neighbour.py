"""A module beside the probing scripts, found by the script's own directory on sys.path."""
