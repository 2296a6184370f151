"""The one table of flags, and what a row of it is.

=============  ==============================================================================
table.py       the table: all flags by their groups and names; the variables that have no flag
job.py         its rows about what is run: size, code, restarts, checkpoints
around.py      its rows about signals, output, the rendezvous, and the rest
flag.py        ``Flag``: a row, the texts that it gets from each source, and their conversion;
               kinds of values that several rows share, and when a flag has no effect
=============  ==============================================================================
"""

__all__ = ["flag", "table"]
