"""Write torch's error record for a script that is run by ``--run-path``.

torchrun's ``--run-path`` writes the record without the script asking (``@record``); its format is
read by elaunch.agent.errorfile. No torch is imported here.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable

from elaunch import env


def recorded(start: Callable[[], object]) -> None:
    """Call ``start``; if it raises an Exception, write the error file and let it go on."""
    try:
        start()
    except Exception as error:
        path = os.environ.get(env.ERROR_FILE)
        if path:
            _write(path, error)
        raise


def _write(path: str, error: Exception) -> None:
    stack = traceback.format_exc()
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    record = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(record, file)
