"""``ctx.checkpoint``: what a script saves and loads, by all ranks together.

============  ======================================================================================
module        does
============  ======================================================================================
context       the calls of a script; which ranks make them
session       the directory or URL, opened when it is first used
latest        what ``latest()`` returns, decided in ``elaunch.init()``
callcontext   what each call works with; one save, as a script requests it
together      an error of one rank is an error of all
where         which directory or URL, whose it is, whether all nodes see the same
collective    one save by all ranks: begin, write, commit
paths         ``store_path``, ``commit``: files that the script, or others' code, writes
restore       ``restore_path``: files that the script reads itself
nodecopies    what nodes with a directory each have together
save          ``save``: sharded, by torch.distributed.checkpoint
handle        when a save is due; what ``save(block=False)`` returns
load          ``load``
dcp           the format of torch.distributed.checkpoint
state         the state of a script as flat leaves, and back; what is equal on all ranks
saver         the worker's end of its agent's saver, which writes in the background
============  ======================================================================================
"""
