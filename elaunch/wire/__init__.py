"""The protocols between processes of one job: on one machine, and between two.

``local`` is the one wire: messages with descriptors over a Unix stream socket. An agent and its
server use it (the messages are those of ``elaunch.server``), an agent and the commands
(``control``), an agent and its workers (``worker``). ``progress`` is a page of memory
that worker and agent both see; with ``recorder`` a worker answers which collectives it has entered,
with ``debugger`` it runs pdb for a command.
``stream`` connects ranks, and the agents of nodes, once they have proved that they belong to one
job; ``forks`` is what a process that was forked from one lets go of.
"""

__all__ = [
    "control",
    "debugger",
    "forks",
    "local",
    "progress",
    "recorder",
    "stream",
    "worker",
]
