"""``ctx.checkpoint``: what a script saves and loads, by all ranks together.

============  ======================================================================================
module        does
============  ======================================================================================
context       the calls of a script; which ranks make them
opening       the directory or URL, when it is first used
parts         what all of them work with
together      an error of one rank is an error of all
where         which directory or URL, whose it is, whether all nodes see the same
store         one save by all ranks: begin, write, commit
blocks        ``store_path``: files that the script writes itself
restore       ``restore_path``: files that the script reads itself
nodecopies    what nodes with a directory each have together
commits       ``commit``: files that somebody else has written
ddp           ``save_ddp`` and ``load_ddp``: one file for all ranks
prepare       what a save knows before a byte is written
save          ``save``: sharded, by torch.distributed.checkpoint
load          ``load``
dcp           the format of torch.distributed.checkpoint
state         the state of a script as flat leaves, and back
saver         the writers of saves in the background
request       one save, as a script asks for it
============  ======================================================================================
"""
