"""Run ``elaunch`` with an agent that says after 1 s, not 30, for which rank the others wait.

It asks them every half second, and logs it after 2 s.
"""

import runpy

from elaunch.agent.hangs import sample

sample.AWAITED_S, sample.TOLD_S = 1.0, 2.0
sample.FIRST_S = sample.EVERY_S = 0.5
sample.SPARING = 0
runpy.run_module("elaunch", run_name="__main__", alter_sys=True)
