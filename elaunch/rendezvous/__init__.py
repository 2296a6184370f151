"""How the agents of a job agree on its rounds: what they publish, who decides, what they read.

================  ================================================================================
module            what it is
================  ================================================================================
plan              the two records: an agent's status, and what the coordinator has decided
records           records as signed JSON, and back; refuses what is foreign, too large or malformed
decide            what follows from the plan and the members: a new plan, a wait, a search (pure)
times             where the time of all nodes' slots went (pure)
text              how nodes, failures and differences are named (pure)
munge             a key that the agents of one user share by MUNGE, and how an agent settles it
coordinatorstate  what the coordinator knows and does next, without waiting
coordinator       its threads: members in, plans out; of one node: its place in the agent's loop
member            one agent as a member: what it asks of the store next, without waiting
waiting           how long an agent waits for others, and its writes for the store (pure)
meeting           its threads, and what an agent uses: join, publish a status, read plans, leave
events            what the threads post to the agent, and the calls that a member asks for
================  ================================================================================
"""
