"""From a fork of the server to a script that sees no difference.

``fork`` makes a worker of the fork: signals, files, random states; ``script`` runs the script as
the interpreter itself would; ``torchfix`` mends what torch gets wrong under a launcher.
"""

__all__ = ["fork", "script"]
