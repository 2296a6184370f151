"""A state directory of the test alone, and agents that are played in it."""

from tests.views.conftest import environ, play

__all__ = ["environ", "play"]
