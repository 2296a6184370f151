"""Where the agents of a job meet, and how they get in: what the rendezvous flags come to.

``rendezvous`` holds the settings that come of it; ``place`` decides whether the agents meet at all,
where, and who hosts; the others read an endpoint, an address, a port, the files with secrets.
"""

__all__ = ["address", "endpoints", "ports", "rendezvous", "topology"]
