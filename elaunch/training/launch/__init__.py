"""Which rank this process is in its job, and what its launcher set for it.

``placement`` finds ranks and the meeting place under any launcher, ``info`` is what a script sees
of it as ``ctx.info``.
"""

__all__ = ["info", "placement"]
