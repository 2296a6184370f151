"""An agent's saver for ranks of a test: real socket, memory and threads, in this process."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path

from msgspec import structs

from elaunch.agent.context import SaverSetup
from elaunch.agent.policy import events
from elaunch.agent.policy.turn import Round
from elaunch.agent.resume.directory import DirectoryFinisher
from elaunch.agent.saver.saver import AgentSaver
from elaunch.agent.status.socket import ControlSocket
from elaunch.agent.workers.links import WorkerLinks
from elaunch.checkpoint.storage.storage import open_storage
from elaunch.config import resolve

RUN_ID = "job"


class SavingAgent:
    """Writes the checkpoints of ``size`` ranks on one node into ``place``, until it is closed."""

    def __init__(self, directory: Path, place: Path, size: int) -> None:
        self.place = place
        directory.mkdir(parents=True, exist_ok=True)
        script = directory / "train.py"
        script.write_text("")
        line = {"checkpoint-dir": str(place)}
        settings = resolve(line, [str(script)], {"PATH": os.environ["PATH"]}, directory)
        settings = structs.replace(settings, run_id=RUN_ID, run_id_given=True)
        self.storage = open_storage(place)
        self.storage.prepare(RUN_ID, given=True)
        self._inbox: queue.SimpleQueue[events.Event | None] = queue.SimpleQueue()
        self.saver = AgentSaver(SaverSetup(settings, self._inbox.put, DirectoryFinisher(settings)))
        self.socket = directory / "agent.sock"
        self._links = WorkerLinks(self._inbox.put, self.saver.serve)
        self._links.start()
        self._control = ControlSocket(self.socket, dict, attach=self._links.adopt)
        self._control.start()
        round_ = Round(0, size)
        self._links.begin(round_)
        self.saver.begin(round_)
        self._loop = threading.Thread(target=self._answer, name="agent of a test", daemon=True)
        self._loop.start()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of its workers."""
        return {
            "ELAUNCH_RUN_ID": RUN_ID,
            "ELAUNCH_RUN_ID_GIVEN": "1",
            "ELAUNCH_ROUND": "0",
            "ELAUNCH_AGENT_SOCKET": str(self.socket),
            "ELAUNCH_CHECKPOINT_DIR": str(self.place),
        }

    def close(self) -> None:
        """End it, when what is in flight is written."""
        self._control.close()
        self._links.close()
        self.saver.close()
        self._inbox.put(None)

    def _answer(self) -> None:
        """Let every round commit, as the loop does while it runs."""
        while (event := self._inbox.get()) is not None:
            if isinstance(event, events.FenceAsked):
                event.answer("")
