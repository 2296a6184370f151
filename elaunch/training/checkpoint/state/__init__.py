"""The state of a script as flat leaves, and back.

``flatten`` walks it under the keys of torch.distributed.checkpoint; ``modules`` and ``optimizers``
go by the names of parameters, ``perrank`` keeps what each rank has for itself, ``tensors`` and
``values`` turn leaves into bytes, ``digests`` are what the ranks compare.
"""

__all__ = ["digests", "flatten", "kinds", "modules", "optimizers", "perrank", "tensors"]
