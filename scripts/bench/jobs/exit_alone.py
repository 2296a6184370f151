"""Exit 7 after a random moment, without torch; the stamp ``exit`` is taken just before.

The random moment gives every phase of a polling launcher the same chance.
"""

from __future__ import annotations

import os
import random
import time

from stamp import prepare, write

if __name__ == "__main__":
    descriptor = prepare("exit")
    time.sleep(random.uniform(0.3, 0.6))
    write(descriptor)
    os._exit(7)
