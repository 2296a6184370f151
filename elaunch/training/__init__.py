"""The script's side: context, collectives, preemption, metrics, heartbeat, sampler.

It shares the lower layers with the agent (errors, env, wire, store, checkpoint …) and nothing
else; the two communicate through the environment, the agent's Unix socket and the round's TCPStore.
"""
