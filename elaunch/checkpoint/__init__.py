"""Checkpoints: what is on disk, which one a round resumes from, how a script is told.

===============  ==================================================================
module           holds
===============  ==================================================================
records          what the modules hand to each other: ``Stage``, ``Committed``, ``Search``, …
layout           every file name of elaunch's own layout, and its JSON documents
storage            ``open_storage`` and the ``Storage`` protocol: where a run's checkpoints are
posixdepot,      its two kinds: a directory; an fsspec URL (``objects``: what is asked of
fsspecdepot      such a storage)
committing       from sealed parts to what readers see; what two committers make of it
assembling,      what a commit writes; one rank's part; what several ranks say, put
manifests,       together
merging
filewriter,      files put on the disk for good; files that scripts have written
sealing
ownership,       whose directory it is: ``run.json``; one job at a time; file systems that
locking, mounts  show what others wrote late
trash,           taken away from readers: to be deleted; damaged
quarantine
places           what a text that says where checkpoints are means
latest           ``find_latest``: the newest complete checkpoint below a directory
candidates       which names below that directory can be checkpoints, and their steps
globs            ``check_glob`` and the walk for ``--checkpoint-glob``
names            what a name says: temporary or not, and the step
placeholder      ``{checkpoint}`` in the script's arguments
own, dcp,        one family each: is this checkpoint complete? ``verify`` returns, or
huggingface,     raises ``CheckpointError`` with the reason
lightning
zips,            the files that they are made of: torch.save archives, safetensors,
safetensors,     pickles (read without running anything of them), plain files
pickles,
pickleops, files
===============  ==================================================================

Nothing imports torch, and nothing in a checkpoint can run code. What ``latest`` reaches only reads.
Import from the modules: the placeholders and the pattern's check do not load the readers.
"""
