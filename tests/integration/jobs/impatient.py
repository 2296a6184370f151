"""Run ``elaunch`` with an agent for which ``--hang-timeout auto`` is 3 s at the least, not 30."""

import runpy

from elaunch.agent.hangs import judge

judge.LEAST = 3.0
runpy.run_module("elaunch", run_name="__main__", alter_sys=True)
