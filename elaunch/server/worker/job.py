"""One worker to start, and the command line that torchrun would have started for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One worker to become: the fields of the ``start`` message."""

    round: int
    local_rank: int
    mode: str
    entrypoint: str
    args: tuple[str, ...]
    interpreter: str
    env: dict[str, str]
    stdout: int
    stderr: int

    def command(self) -> list[str]:
        """Return the command line that torchrun would have started."""
        if self.mode == "command":
            return [self.entrypoint, *self.args]
        module = ["-m"] if self.mode == "module" else []
        return [self.interpreter, "-u", *module, self.entrypoint, *self.args]
