"""The metrics that a script reports while it trains, in its run directory.

=========================  =======================================================================
metrics.jsonl              one row in each line: ``group``, ``steps_completed``, ``round``,
                           ``rank``, ``time`` (seconds since the epoch), and the metrics
metrics.superseded.jsonl   rows of earlier rounds that a later round began again (``files``)
metrics.rounds.json        where each round began: what decides which rows are superseded
metrics.lock               held (flock) while any of the three changes: a node's ranks share them
tensorboard/rank-<rank>/   the same for TensorBoard, where it is asked for
=========================  =======================================================================

``rows`` checks and encodes what is reported, at the call, and remembers the newest; ``writer`` is
the thread that writes it, for TensorBoard too; ``files`` appends under the lock, and decides what
is superseded; ``reading`` reads it all again, for ``elaunch metrics`` and screens.
"""
