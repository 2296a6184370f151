"""The state of a script as flat leaves, and back.

``flatten`` walks it under the keys of torch.distributed.checkpoint; ``modules`` and ``optimizers``
go by the names of parameters, ``perrank`` keeps what each rank has for itself, ``tensors`` are
turned into bytes, ``kinds`` tell leaves apart, ``compare`` has the ranks send digests of what must
be equal; ``savedfile`` fills a state from one file of torch.save.
"""

__all__ = [
    "compare",
    "flatten",
    "kinds",
    "perrank",
    "savedfile",
    "tensors",
]
