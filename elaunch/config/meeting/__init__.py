"""Where the agents of a job meet, and how they get in, by the rendezvous flags.

``rendezvous`` holds the resulting settings; ``place`` decides whether the agents meet at all,
where, and which one hosts; the others read an endpoint, an address, a port, the files with secrets.
"""

__all__ = ["address", "endpoints", "ports", "rendezvous", "topology"]
