"""Checkpoints: what is on disk, which one a round resumes from, how a script is told.

===============  ==================================================================
module           holds
===============  ==================================================================
records          ``Checkpoint``, ``PassedOver``, ``Search``: what a search returns
layout           every file name of elaunch's own layout, and its JSON documents
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

Everything here only reads. Nothing imports torch, and nothing in a checkpoint can run code.
Import from the modules: the placeholders and the pattern's check do not load the readers.
"""
