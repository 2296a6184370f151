"""What happens to the store of a simulated job itself: faults that no agent and no link has.

=========  =======================================================================================
late       a member is frozen: what it was sent is done elsewhere, and again when it wakes
together   all agents are frozen for longer than their entries live, as by a suspended host
wiped      it is down for some seconds and comes back empty
full       it takes no more writes, for good or for some seconds
restored   it is down for some seconds and comes back as it was a while ago
moves      its leader moves again and again: no entry expires
=========  =======================================================================================
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.rendezvous.simstore import Saved

if TYPE_CHECKING:
    from tests.rendezvous.simulation import Simulation

WITHIN = 14.0
KINDS = ("late", "late", "together", "wiped", "restored", "full", "moves", "moves")


def schedule(sim: Simulation, rng: random.Random) -> None:
    """Draw what happens to the store of a job, and when."""
    save(sim, rng.uniform(0.0, WITHIN / 2))
    for _ in range(rng.randint(1, 3)):
        kind, at = rng.choice(KINDS), rng.uniform(1.0, WITHIN)
        seconds = rng.choice((0.5, 2.5, 4.0, 8.0)) * rng.uniform(0.8, 1.2)
        draw = rng.random()
        if sim.setting.hosted and kind != "together":
            continue
        sim.engine.after(at, lambda k=kind, s=seconds, d=draw: _strike(sim, k, s, d))  # type: ignore[misc]


def _strike(sim: Simulation, kind: str, seconds: float, draw: float) -> None:
    there = [agent for agent in sim.agents if agent.alive]
    sim.note(f"the store: {kind} {seconds:.2f} s")
    if kind == "late":
        for agent in there[int(draw * 2) :: 2] or there:
            agent.link.held = sim.engine.now + seconds
    elif kind == "together":
        for agent in there:
            sim.freeze(agent, seconds)
    elif kind == "moves":
        sim.store.unsteady = True
        sim.engine.after(4 * seconds, sim.store.settle)
    elif kind == "full":
        store = sim.store
        store.full = True
        if draw < 0.7:
            sim.engine.after(seconds, lambda: setattr(store, "full", False))
    else:
        _lose(sim, seconds, None if kind == "wiped" else sim.saved)


def _lose(sim: Simulation, seconds: float, saved: Saved | None) -> None:
    store = sim.store
    store.leaderless = True

    def back() -> None:
        store.lose(saved)
        sim.on_lost()
        store.restore()
        store.touch()

    sim.engine.after(min(seconds, 3.0), back)


def save(sim: Simulation, at: float) -> None:
    """Have a snapshot of the store taken, once."""

    def take() -> None:
        sim.note("the store is saved")
        sim.saved = sim.store.save()

    sim.engine.after(at, take)
