"""The workers' output, from their pipes to files, the console and the last lines in memory.

One thread, the pump, reads every stream of every worker, so that no worker waits for a slow
terminal. A round owns its files: a new round may open its own while the old one's are still being
closed. ``console`` prints the agent's own log lines between the workers'.
"""

__all__ = ["console", "files", "plan", "pump"]
