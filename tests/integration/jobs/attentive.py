"""Run ``elaunch`` with an agent that says after 1 s, not 30, for which rank the others wait.

It asks them every half second, and logs it after 2 s.
"""

import runpy

from elaunch.agent.hangs import lateness

lateness.AWAITED_S, lateness.TOLD_S = 1.0, 2.0
lateness.FIRST_S = lateness.EVERY_S = 0.5
lateness.SPARING = 0
runpy.run_module("elaunch", run_name="__main__", alter_sys=True)
