"""Requests from one node's agent to another's, over TCP and behind the job's key.

They report shards to the agent that commits, bring shards and replicas from memory to memory, and
with ``--checkpoint-local`` files from disk to disk: ``directory`` is a node's own, ``search`` asks
all nodes for theirs. At a hang the agents are asked where their ranks are, too.
"""

__all__ = ["directory", "messages", "peers", "search"]
