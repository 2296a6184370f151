"""Saves in the background: shards that workers leave in the agent's memory are written by it.

The memory is the agent's, so what lies in it outlives the worker. ``saver`` is what the loop sees,
and costs nothing until a worker asks for it; ``service`` does the work, with one thread for each
worker. ``queue`` writes shards and commits the stage when all manifests are there; ``inflight`` is
its record of which are. On several nodes ``commitrules`` sends manifests to the agent that commits,
and shards and replicas are fetched from other agents (``elaunch.agent.peers``).
"""

__all__ = ["saver"]
