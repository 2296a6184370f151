"""The private channel between the ranks of one job: how objects get from each to all.

Meeting. Every rank puts a record into the round's store (where it listens, on which machine) and
reads those of all; see meeting.py. Each rank listens on an abstract Unix socket and, where there
are several nodes, on a TCP port. Both ends of a connection first prove that they know the job's key
(elaunch.wire.stream); before that nothing is unpickled and nothing kept.

Two levels. The ranks of a node are connected to its first one, the node's chief, by Unix sockets.
The chiefs are a tree; the node of rank 0 is its root.

One call (channel.py) is the same for all kinds: entries go up the tree, and when those of all ranks
are at the root, what each rank lacks comes down. So it returns nowhere before all ranks have called
it, and a rank that calls something else is found where its entry meets another. The channel is made
for control messages: an object passes once over each connection on its way, and no rank copies it
but into the memory where its arrays and tensors then lie.

A rank that fails or whose deadline passes sends its neighbours the reason, and they theirs. From
then on every call of the channel fails, with the first cause.
"""
