"""Print the seconds that ``import elaunch; elaunch.init`` takes, and the process's CPU time so far.

Arguments: ``torch`` to import torch first, which is only in the CPU time; ``elaunch`` to import
elaunch.
"""

import sys
import time

if "torch" in sys.argv:
    import torch  # noqa: F401

begin = time.monotonic()
if "elaunch" in sys.argv:
    import elaunch

    elaunch.init  # noqa: B018 - it is this that loads the module
print(time.monotonic() - begin, time.process_time())
