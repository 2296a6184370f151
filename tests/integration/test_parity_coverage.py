"""coverage measures the same lines of each rank and round as under torchrun, however it is begun.

It is the workers' module (``-m coverage run SCRIPT``), or begins with each process
(COVERAGE_PROCESS_START): once in the server, whose forks go on with a file of their own.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.integration.parity.launches import Outcome, Start, launch_alike

pytestmark = [pytest.mark.slow, pytest.mark.executed, pytest.mark.trial]

# In the first round rank 0 fails once rank 1, which SIGTERM ends, has gone where it stays.
SCRIPT = """\
import os, time
from beside import doubled
flag = os.environ["PARITY_OUT"] + "/ready"
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    print("again", doubled(2))
elif os.environ["RANK"] == "0":
    while not os.path.exists(flag): time.sleep(0.01)
    raise SystemExit(3)
else:
    open(flag, "w").close()
    while True: time.sleep(0.01)
"""
BESIDE = "def doubled(x):\n    return 2 * x\n\n\ndef never(x):\n    return x\n"
SETTINGS = """
[run]
parallel = True
sigterm = True
source = .
data_file = ${PARITY_OUT}/lines
"""
LINES = {
    ("train.py: 1 2 3 4 6 7 8", "beside.py: 1 5"): 1,
    ("train.py: 1 2 3 4 6 10 11", "beside.py: 1 5"): 1,
    ("train.py: 1 2 3 4 5", "beside.py: 1 2 5"): 2,
}
WAYS = {
    "as a module": (["-m", "coverage", "run", "train.py"], {}),
    "with each process": (["train.py"], {"COVERAGE_PROCESS_START": ".coveragerc"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_lines_of_each_rank_and_round(tmp_path: Path, way: str) -> None:
    """Two ranks, two rounds: four files."""
    for name, text in (("train.py", SCRIPT), ("beside.py", BESIDE), (".coveragerc", SETTINGS)):
        (tmp_path / name).write_text(text)
    words, env = WAYS[way]
    start = Start(words, workers=2, options=("--max-restarts", "1"), env=env)
    outcomes = launch_alike(tmp_path, start)
    found = {method: (one.code, _measured(one)) for method, one in outcomes.items()}
    assert found == dict.fromkeys(outcomes, (0, LINES))


def _measured(outcome: Outcome) -> Counter[tuple[str, ...]]:
    """Count the files of coverage by the lines in them; a launcher's own has none."""
    from coverage import CoverageData

    counted: Counter[tuple[str, ...]] = Counter()
    for path in outcome.out.glob("lines.*"):
        data = CoverageData(str(path))
        data.read()
        files = sorted(data.measured_files(), reverse=True)
        lines = [" ".join(map(str, sorted(data.lines(file) or ()))) for file in files]
        shown = (f"{Path(file).name}: {text}" for file, text in zip(files, lines, strict=True))
        counted[tuple(shown)] += any(lines)
    return +counted
