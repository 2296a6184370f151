"""The metrics that a script reports while it trains, in its run directory.

=========================  =======================================================================
metrics.jsonl              one row in each line: ``group``, ``steps_completed``, ``round``,
                           ``rank``, ``time`` (seconds since the epoch), and the metrics
metrics.rounds.json        where each round began: which rows of earlier ones readers leave out
metrics.lock               held (flock) while one of the two changes: a node's ranks share them
tensorboard/rank-<rank>/   the same for TensorBoard, where it is asked for
=========================  =======================================================================

``rows`` checks and encodes what is reported, at the call, and remembers the newest; ``writer`` is
the thread that writes it, for TensorBoard too; ``files`` appends under the lock, and notes where
each round began; ``reading`` leaves out what a later one did again, for ``elaunch metrics``,
screens and ``elaunch.read_metrics()``.
"""
