"""The objects that ranks give each other, as bytes: pickles, of which a stranger's run nothing."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from typing import Any, Final

from elaunch.env import CHANNEL_KEY
from elaunch.errors import CollectiveError
from elaunch.store.tcp.wire import LONGEST
from elaunch.training import unpickling
from elaunch.training.agreement import Value

UNSHARED: Final = (
    "the ranks share no key, so anybody who reaches the round's store "
    "could have sent it. Give --rdzv-secret-file to every agent of `elaunch run`, or "
    f"{CHANNEL_KEY}, the same 64 random hex digits, to every rank under another launcher; or name "
    "the class to torch.serialization.add_safe_globals on all ranks"
)


class Refused(CollectiveError):
    """This rank's object cannot be sent; ``how``: for its ``size``, or it cannot be pickled."""

    how = "pickle"


class _Pickler(pickle.Pickler):
    """Pickles tensors without what else is in the memory that they are a part of."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild a part of a tensor; everything else as usual."""
        torch = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.Tensor or obj.layout != torch.strided:
            return NotImplemented
        if obj.requires_grad or obj.untyped_storage().nbytes() == obj.nbytes:
            return NotImplemented
        return obj.clone().__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def packed(obj: Any, purpose: str) -> bytes:
    """Return an object as bytes; those for a purpose of elaunch's own may be larger."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(obj)
    if not purpose and file.tell() > LONGEST:
        refused = Refused(
            f"its object has {file.tell():,} bytes, and {LONGEST:,} are the most: use "
            "torch.distributed for what is larger (broadcast, all_gather_object)"
        )
        refused.how = "size"
        raise refused
    return file.getvalue()


def unpacked(value: Value, own: Any) -> Any:
    """Return the object that a rank gave; ``own``: of its classes a stranger's may be, too."""
    if value.trusted:
        return pickle.loads(value.content)
    return unpickling.load_careful(value.content, unpickling.Records(unpickling.named_by([own])))


def attempt(what: str, work: Callable[[], Any]) -> Any:
    """Return what ``work()`` returns; what it raises becomes the cause of a CollectiveError."""
    try:
        return work()
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"{what}: {type(error).__name__}: {error}") from error
