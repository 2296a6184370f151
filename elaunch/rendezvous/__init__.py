"""How the agents of a job agree on its rounds: what they write, who decides, and how they hear it.

================  ================================================================================
module            what it is
================  ================================================================================
plan              the two records: what an agent says of itself, what the coordinator has decided
records, schema   records as signed JSON, and back; refuses what is foreign, too large or malformed
view              what a decision depends on, and what it can be
decision          what follows from the plan and the roster: a new plan, a wait, a search (pure)
growth            newcomers while a round runs (pure)
formation         how a round comes about, and membership: who is in it (pure)
order             in which order (pure)
sharing           whether they share the checkpoint directory (pure)
budget            whether a failed round may be followed by another (pure)
facts, words      what differs between nodes, and how things are said (pure)
coordinatorstate  what the coordinator knows and does next, without waiting
coordinator       its threads: roster in, plans out
member, tasks     one agent's place in the job: what it asks of the store next, without waiting
waiting           for whom an agent without workers waits, and for how long (pure)
meeting           its threads, and what an agent uses: join, say how it is, hear plans, leave
news              what the agent hears
================  ================================================================================
"""
