"""Saves in the background: shards that workers leave in the agent's memory are written by it.

The memory is the agent's, so what lies in it outlives the worker. ``saver`` is what the loop sees,
and costs nothing until a worker asks for it; ``service`` is the work itself, with one thread for
each worker. On several nodes shards and replicas are fetched from other agents
(``elaunch.agent.peers``).
"""

__all__ = ["plan", "saver"]
