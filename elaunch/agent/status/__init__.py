"""The status of a running agent: what others can see of it, and what it writes down.

``record`` keeps the run's record and puts it on the disk in a thread of its own; ``socket`` answers
``elaunch status`` and its like, ``views`` shows commands the stacks and log files of all nodes,
``webpages`` has a process serve the run in the browser, ``httpport`` answers HTTP probes and
Prometheus; ``kubeflow`` posts how far the job is, ``onevent`` hands over what happens, both by
``posting``; ``ledger`` adds up where the time goes; ``decisionlog`` writes the log
lines, ``eventlog`` torch's events.
"""

__all__ = [
    "decisionlog",
    "eventlog",
    "httpport",
    "kubeflow",
    "ledger",
    "onevent",
    "record",
    "socket",
    "views",
    "webpages",
]
