"""``ctx.train.steps``: a training loop whose numbers do not depend on how many ranks compute it.

========== =======================================================================================
module     does
========== =======================================================================================
loop       the loop: resumes, saves, ends in time; its options
step       one step, as the script's loop body sees it
refusals   what the loop cannot train, found on all ranks before the first step
order      which samples a step takes, and in which micro-batches; the seeds of each
feed       the batches of this rank, by a dataset and its loader, or by a function
tree       the order of a step's sums: one for all numbers of ranks
gradients  the gradients of one rank's micro-batches, and their sum over all ranks
check      micro-batches that two ranks compute, and whose bits are compared
group      the ranks' own process group
world      the ranks that compute: those that are left when others die, and that come back
========== =======================================================================================
"""

__all__ = ["feed", "loop", "refusals", "step", "world"]
