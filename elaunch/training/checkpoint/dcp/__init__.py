"""The format of torch.distributed.checkpoint, written and read without its file layer.

``plan`` asks torch's planner which rank writes what, ``image`` makes the files of a rank from it,
``metadata`` and ``read`` take them apart again, from ``sources`` that compare checksums meanwhile,
``convert`` goes to and from one file of ``torch.save``.
"""

__all__ = ["archives", "convert", "image", "metadata", "plan", "read", "sources", "transfer"]
