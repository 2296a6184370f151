"""The server's entry: ``python -u …/elaunch/server/__main__.py FD [padding]``.

It is run by path, not by ``-m``, so that a script's ``sys.path`` does not get the launcher's
working directory, and so that another interpreter (PYTHON_EXEC) that lacks elaunch can run it.
The padding makes room in the argument area for the workers' process titles.

This file is at the bottom of a forked worker's stack and the script's ``__main__`` right above it.
"""

import os
import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from elaunch.server import script, torchfix
from elaunch.server.loop import serve
from elaunch.wire import recorder

del sys.path[0]

if __name__ == "__main__":
    _job = serve(int(sys.argv[1]))  # comes back in a forked worker only
    try:
        script.prepare(_job)()
    except BaseException as _error:
        recorder.leave(_error)
        torchfix.leave_out_destructors(_error)
        script.forget_server(_error)
        raise  # adds no frame of its own: the interpreter shows what the script has left
