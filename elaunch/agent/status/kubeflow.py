"""How far the job is, for ``kubectl get trainjob``: Kubeflow Trainer's status server (KEP-2779).

Kubeflow sets three variables in the pods of a TrainJob where its feature gate TrainJobStatus is on:

=================================  ===============================================================
``KUBEFLOW_TRAINER_SERVER_URL``    where to post to; without it nothing of this module is imported
``KUBEFLOW_TRAINER_SERVER_CA_CERT``  file with the authority of its certificate
``KUBEFLOW_TRAINER_SERVER_TOKEN``  file with the bearer token; it changes, and is read every time
=================================  ===============================================================

The agent of rank 0 posts what has changed, every INTERVAL_S at most, once the script has reported a
progress (``ctx.train.report_progress``): one that tells Kubeflow itself is not disturbed::

    {"trainerStatus": {"progressPercentage": 45, "estimatedRemainingSeconds": 7956,
                       "metrics": [{"name": "step", "value": "1200"}, …], "lastUpdatedTime": …}}

One thread does that, and nobody waits for it. A server that refuses, or does not answer, is
reported once, and asked more and more seldom.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from elaunch.agent.background import BackgroundWork
from elaunch.agent.status import posting
from elaunch.env import KUBEFLOW_URL
from elaunch.runs.pace import StepRate
from elaunch.text import one_line

CA_CERT: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"
INTERVAL_S: Final = 10.0
LONGEST_S: Final = 300.0
"""Seconds between two tries of a server that does not take them."""
CLOSE_S: Final = 2.0
"""Seconds for the last post; the job's end waits no longer for it."""
MOST_SECONDS: Final = 2**31 - 1


def status_of(record: Mapping[str, Any], pace: StepRate, now: float) -> dict[str, Any] | None:
    """Return what to post of a run's record; None without rank 0, or a progress of its script."""
    workers = (record.get("progress") or {}).get("workers", ())
    first = next((worker for worker in workers if worker["rank"] == 0), None)
    if first is None or first["progress"] is None:
        return None
    progress = 1.0 if record["state"] == "COMPLETED" else min(max(first["progress"], 0.0), 1.0)
    found: dict[str, Any] = {"progressPercentage": int(100 * progress)}
    pace.see(now, record["round"], [{**first, "progress": progress}])
    if pace.eta_s is not None:
        found["estimatedRemainingSeconds"] = min(round(pace.eta_s), MOST_SECONDS)
    numbers = {"step": first["step"], "restarts": record["restarts"]["used"]}
    found["metrics"] = [
        {"name": name, "value": str(value)} for name, value in numbers.items() if value is not None
    ]
    return found


class TrainJobStatus:
    """Owns the thread, from :meth:`start` to :meth:`close`.

    Args:
        environ: has the variables.
        snapshot: returns the run's record, with the progress of now.
    """

    def __init__(
        self, environ: Mapping[str, str], snapshot: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._environ = environ
        self._snapshot = snapshot
        self._pace = StepRate()
        self._posted: dict[str, Any] | None = None
        url = re.sub(r"//[^/]*@", "//", one_line(environ[KUBEFLOW_URL])).partition("?")[0]
        what = f"Kubeflow does not learn how far the job is ({KUBEFLOW_URL}={url!r}):"
        self._background = BackgroundWork("kubeflow", what, INTERVAL_S, LONGEST_S)

    def start(self) -> None:
        """Begin to post."""
        self._background.start(self._run)

    def close(self) -> None:
        """Have the end posted, and end the thread; takes CLOSE_S at the most."""
        self._background.close(CLOSE_S)

    def _run(self) -> None:
        pause, last = INTERVAL_S, False
        while not last:
            last = self._background.closing.wait(pause)
            try:
                self._post_news()
                pause = self._background.back_off(failed=False)
            except posting.REFUSED as error:
                pause = self._background.back_off(failed=True)
                self._background.report(one_line(str(error)[: posting.MOST_BYTES]))

    def _post_news(self) -> None:
        found = status_of(self._snapshot(), self._pace, time.monotonic())
        if found is None or found == self._posted:
            return
        at = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        post(self._environ, {"trainerStatus": {**found, "lastUpdatedTime": at}})
        self._posted = found


def post(environ: Mapping[str, str], body: Mapping[str, Any]) -> None:
    """Post ``body``; nothing but https gets the token.

    Raises one of posting.REFUSED where it is not taken within some seconds.
    """
    headers: dict[str, str] = {}
    if environ.get(TOKEN):
        scheme = urlsplit(environ[KUBEFLOW_URL]).scheme
        if scheme != "https":
            raise ValueError(f"its scheme is {scheme!r}, not https: no token is sent there")
        headers["Authorization"] = f"Bearer {_token(environ[TOKEN])}"
    posting.post(environ[KUBEFLOW_URL], body, headers, environ.get(CA_CERT) or None)


def _token(path: str) -> str:
    """Return the token in a file; the error for one that no header can have does not show it."""
    token = Path(path).read_bytes().strip().decode("ascii", "replace")
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(f"{path} does not have one token, of printable ASCII, in it")
    return token
