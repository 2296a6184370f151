"""What a script imports: context, collectives, preemption, metrics, heartbeat, sampler.

It shares the lower layers with the agent (errors, env, progress, worklink, store) and nothing else;
they talk through the environment, the agent's Unix socket and the round's TCPStore.
"""
