"""Write an exception in the form of torch's ``@record``, without torch.

The launcher names a file in ``TORCHELASTIC_ERROR_FILE``; the worker leaves there, as JSON::

    {"message": {"message": "ValueError: boom",
                 "extraInfo": {"py_callstack": "Traceback …", "timestamp": "1700000000"}}}

elaunch.agent.failure.errorfile reads it, as torchrun does. What ``--run-path`` runs is recorded
without the script asking for it; other scripts ask by ``elaunch.record``.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback

from elaunch import env


def write(error: Exception) -> None:
    """Write ``error``, which is being handled, to the launcher's file; without one do nothing.

    A file that cannot be written is a line in the log: it must not hide the error itself.
    """
    path = os.environ.get(env.ERROR_FILE)
    if not path:
        return
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    record = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(record, file)
    except OSError as problem:
        # A logger made at the import would be found in every forked worker.
        log = logging.getLogger("elaunch")
        log.warning("%s=%s cannot be written: %s", env.ERROR_FILE, path, problem.strerror)
