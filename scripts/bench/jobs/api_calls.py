"""Call what a script calls in every step, and leave what one call costs.

``$BENCH_DIR/calls.<round>.<rank>`` has, for each call, the microseconds per call of every loop (the
time of the loop over its calls, with the loop's own cost in it), and for reports at the pace of
short steps each call's microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stamp import leave

import elaunch

LOOPS = 10
CHEAP_CALLS = 20_000
REPORTS = 5_000  # in each loop: long enough that the thread that writes them runs in it, too
PACED_REPORTS = 400
PACE_SECONDS = 0.001
US = 1e6


def main() -> None:
    """Run one worker."""
    with elaunch.init(announce=False) as ctx:
        found = {
            "should_preempt": _loops(ctx.preempt.should_preempt, CHEAP_CALLS),
            "heartbeat": _loops(ctx.heartbeat, CHEAP_CALLS),
            "report": _loops(_reporter(ctx), REPORTS),
            "report_paced": _paced(_reporter(ctx)),
        }
    leave("calls", found)


def _loops(call: Callable[[], object], calls: int) -> list[float]:
    """Return the microseconds per call of each loop."""
    per_call = []
    for _ in range(LOOPS):
        begin = time.monotonic()
        for _ in range(calls):
            call()
        per_call.append((time.monotonic() - begin) / calls * US)
    return per_call


def _paced(call: Callable[[], object]) -> list[float]:
    """Return the microseconds of single calls, each after a pause."""
    single = []
    for _ in range(PACED_REPORTS):
        time.sleep(PACE_SECONDS)
        begin = time.monotonic()
        call()
        single.append((time.monotonic() - begin) * US)
    return single


def _reporter(ctx: elaunch.Context) -> Callable[[], None]:
    step = 0

    def report() -> None:
        nonlocal step
        step += 1
        metrics = {"loss": 1.0 / step, "learning_rate": 1e-3, "samples": 512 * step}
        ctx.train.report_training_metrics(steps_completed=step, metrics=metrics)

    return report


if __name__ == "__main__":
    main()
