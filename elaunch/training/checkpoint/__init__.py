"""``ctx.checkpoint``: what a script saves and loads, by all ranks together.

============  ======================================================================================
module        does
============  ======================================================================================
context       the calls of a script; who makes them together
opening       the directory or URL, when it is first used
parts         what all of them work with
agreeing      an error of one rank is an error of all
where         which directory or URL, whose it is, whether all nodes see the same
storing       one save by all ranks: begin, write, commit
blocks        ``store_path``: files that the script writes itself
restoring     ``restore_path``: files that the script reads itself
nodecopies    what nodes with a directory each have together
commits       ``commit``: files that somebody else has written
singlefile    ``save_ddp`` and ``load_ddp``: one file for all ranks
plainstate    what is in that file, and what has to be the same on all ranks
loadable      what torch would not load is not saved
filling       what is in that file, into the objects of a state
saving        ``save``: sharded, by torch.distributed.checkpoint
loading       ``load``
torcherrors   the OSError behind what torch raises
============  ======================================================================================
"""
