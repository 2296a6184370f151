"""The small process between the agent and the workers: it starts, waits for and sweeps them."""
