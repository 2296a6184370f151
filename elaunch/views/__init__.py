"""Runs and jobs for people and programs: they are read, then made a page, or JSON.

=====================  ========================================================================
read, store            make the one document of a job: of a run on this machine
                       (elaunch.runs.job), or as the store has it in which its agents meet
page, json             make text of it, and the documents of docs/status-json.md
layout                 prints pages
watch                  reads again until the end
attention, failures    what a person should look at, and the reports of failed rounds
agents                 asks agents for stacks, profiles and log files, and to end or to restart
logs, logtail          the workers' output, as it came, or the newest lines
curves                 what the script has reported
checkpoints            a checkpoint directory; ``checkpointtarget`` finds the one that is meant
=====================  ========================================================================
"""

__all__ = [
    "agents",
    "attention",
    "checkpoints",
    "checkpointtarget",
    "curves",
    "failures",
    "json",
    "layout",
    "logs",
    "logtail",
    "page",
    "read",
    "store",
    "watch",
]
