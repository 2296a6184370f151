"""Write docs/errors.md from the catalogue of known causes (elaunch.agent.failure.explain).

python scripts/error_docs.py            write it
python scripts/error_docs.py --check    fail where it is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from elaunch.agent.failure import explain

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
BEGINNING = """# Errors: what each code means, and what to do

Written by `scripts/error_docs.py` from the catalogue; do not edit it here. `elaunch explain CODE`
prints one part, `elaunch explain` lists all; a [failure report](failure-report.md) names the code
where it knows the cause, and each message with which elaunch itself refuses or ends a job has one
at its end: `(elaunch explain E-PORT-IN-USE)`.

What a worker has printed counts only after exit codes 1 and 2, SIGABRT and SIGBUS: in the last
exception first, with those that it was raised from, then in the rest of the traceback; without a
traceback in the last 20 lines. The first code of this page that fits is taken. Other exit codes are
the script's own.

"""


def page() -> Iterator[str]:
    """Yield the sections, with a part for each cause."""
    for heading, causes in explain.SECTIONS.items():
        yield f"## {heading}\n"
        for cause in causes:
            told = explain.told(cause, "`")
            words = [f"*{title}*: {text}" if title else text for title, text in told]
            parts = [f"### {cause.code}", *map(explain.folded, words[:-1]), words[-1]]
            yield "\n\n".join(parts) + "\n"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    text = BEGINNING + "\n".join(page())
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print("docs/errors.md is out of date: run python scripts/error_docs.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
