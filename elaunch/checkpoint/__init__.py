"""Checkpoints: what is on disk, which one a round resumes from, how a script gets it.

===============  ==================================================================
module           holds
===============  ==================================================================
records          the data that the modules pass to each other: ``Stage``, ``Committed``, …
layout           every file name of elaunch's own layout, and its JSON documents
ownership        whose directory it is: ``run.json``; one job at a time
probe            whether a directory is fit for use, and all nodes share it
storage          where a run's checkpoints are: ``open_storage``; the commit
manifests        what one rank has written: the manifest's document
assemble         the documents of a checkpoint, made of all manifests
search           ``find_latest``; ``--checkpoint-glob``; ``{checkpoint}`` in arguments
formats          one module a format: is this checkpoint complete? ``verify`` returns, or
                 raises ``CheckpointError`` with the reason
retention        which checkpoints stay, and the removal of the others
shelves          pins, quarantine, trash
nodelocal        checkpoints where every node has a directory of its own
===============  ==================================================================

Nothing imports torch, and nothing in a checkpoint can run code. A search only reads.
Import from the modules: the placeholders and the pattern's check do not load the readers.
"""
