"""elaunch: a launcher and elastic supervisor for distributed PyTorch training."""

__version__ = "0.1.0"
