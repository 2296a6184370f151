"""Pickles that run code when they are read: they leave a file, which no test may find.

Nothing here harms: what would run makes one empty file in the test's own directory.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Call:
    """Pickles as a call of ``called`` with ``args``."""

    def __init__(self, called: Callable[..., Any], *args: Any) -> None:
        self.called, self.args = called, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return what unpickling calls."""
        return self.called, self.args


def runs_shell(mark: Path) -> Call:
    """Return an object whose unpickling has a shell make ``mark``."""
    return Call(os.system, f"touch '{mark}'")


def gadgets(mark: Path) -> dict[str, bytes]:
    """Return pickles that make ``mark`` in various ways, by name."""
    code = f"open({str(mark)!r}, 'w').close()"
    shell = f"(S'touch {mark}'\n"
    return {
        "a shell": pickle.dumps(runs_shell(mark)),
        "eval": pickle.dumps(Call(eval, code)),
        "exec, protocol 0": pickle.dumps(Call(exec, code), 0),
        "INST": f"{shell}ios\nsystem\n.".encode(),
        "OBJ": b"(cos\nsystem\nS'touch " + str(mark).encode() + b"'\no.",
        "a dotted name": _named("torch.serialization.os", "system", mark),
        "dots in a name of a module on the list": _named("torch.serialization", "os.system", mark),
        "torch.load of what it carries": pickle.dumps(
            Call(_load_from_bytes(), pickle.dumps(runs_shell(mark)))
        ),
        "an extension": b"\x80\x02\x82\x01.",
        "getattr": pickle.dumps(Call(getattr, Call(__import__, "os"), "system")),
    }


def _named(module: str, name: str, mark: Path) -> bytes:
    words = [_text(module), _text(name), b"\x93", _text(f"touch {mark}"), b"\x85R."]
    return b"\x80\x04" + b"".join(words)


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _load_from_bytes() -> Callable[..., Any]:
    import torch

    return torch.storage._load_from_bytes  # type: ignore[attr-defined,no-any-return]
