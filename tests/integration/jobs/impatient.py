"""Run ``elaunch`` whose ``--hang-timeout auto`` waits 5 s for what it has not learned, not 300."""

import runpy

from elaunch.agent.hangs import hang

hang.UNLEARNED_S = 5.0
runpy.run_module("elaunch", run_name="__main__", alter_sys=True)
