"""Tables whose rows are tried in one test: as tests of their own most would cost more than they do.

Each process of pytest makes every test, and most rows are a call of a pure function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def each(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Any], Any]:
    """Call a test for each row, as ``pytest.mark.parametrize`` does; show the row that fails.

    It is for tests without fixtures that a row could leave something in.
    """
    split = names.split(",") if isinstance(names, str) else names
    keys = [name.strip() for name in split]
    table = [row if len(keys) > 1 else (row,) for row in rows]

    def over(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def tried(**others: Any) -> None:
            for row in table:
                try:
                    test(**others, **dict(zip(keys, row, strict=True)))
                except BaseException:
                    print("the row that fails:", *(repr(value) for value in row))
                    raise

        given = inspect.signature(test)
        left = [one for name, one in given.parameters.items() if name not in keys]
        tried.__signature__ = given.replace(parameters=left)  # type: ignore[attr-defined]
        return tried

    return over
