"""The loop on one rank: what a script sees of it, and what it may not do in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from elaunch.errors import ContextError, NotFiniteError
from elaunch.training.steps.loop import Steps
from tests.training.rankrig import in_threads
from tests.training.stepsrig import Rig, X


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A rig for one test."""
    made = Rig()
    yield made
    made.close()


def test_a_step_is_that_of_plain_torch(rig: Rig) -> None:
    """The mean over all samples, in the order that is asked for."""
    other = nn.Linear(2, 1)
    other.load_state_dict(rig.model.state_dict())
    plain = torch.optim.SGD(other.parameters(), lr=0.001)
    for step in rig.loop(shuffle=False, until=3, last="short"):
        for (x,) in step.micro_batches():
            step.backward(rig.model(x).square().mean())
        step.apply(rig.optimizer)
        first = 4 * (step.number - 1)
        loss = other(X[first : first + 4]).square().mean()
        plain.zero_grad()
        loss.backward()
        plain.step()
        assert step.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert torch.allclose(rig.model.weight, other.weight, rtol=1e-5)
    assert step.is_last_of_epoch and step.number == 3
    assert [number for number, _ in rig.reported] == [1, 2, 3]
    assert rig.reported[2][1]["loss"] == step.loss


def test_epochs_and_metrics_are_seen(rig: Rig) -> None:
    """A mean of what was logged in micro-batches; what was logged outside stays as it is."""
    seen = []
    loop = rig.loop(until=None, epochs=2)
    for step in loop:
        for (x,) in step.micro_batches():
            step.log(leaf=step.leaf, first=None if step.leaf else 7.0)
            step.backward(rig.model(x).square().mean())
        step.apply(rig.optimizer, clip=1e-3)
        step.log(rate=0.5)
        assert step.metrics["leaf"] == 0.5 and step.metrics["first"] == 7.0
        assert step.grad_norm > 1e-3
        norm = sum(
            float(p.grad.square().sum()) for p in rig.model.parameters() if p.grad is not None
        )
        assert norm**0.5 == pytest.approx(1e-3, rel=1e-3)
        seen.append((step.epoch, step.is_last_of_epoch))
    assert seen == [(0, False), (0, True), (1, False), (1, True)]
    assert (loop.done, loop.epoch, loop.preempted) == (4, 2, False)
    assert rig.reported[-1] == (4, {**step.metrics, "rate": 0.5})


def test_a_function_gives_the_batches(rig: Rig) -> None:
    """By the numbers of step and leaf, with random numbers that repeat."""
    asked: list[tuple[int, int, float]] = []

    def batch(step: int, leaf: int) -> torch.Tensor:
        asked.append((step, leaf, float(torch.rand(()))))
        return X[:2]

    for _ in range(2):
        for step in rig.loop(dataset=None, batch=batch, until=2):
            for x in step.micro_batches():
                step.backward(rig.model(x).square().mean())
            step.apply(rig.optimizer)
    assert [one[:2] for one in asked[:4]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert asked[:4] == asked[4:] and len({one[2] for one in asked}) == 4


def test_a_scaler_of_half_precision_is_taken(rig: Rig) -> None:
    """Its step is skipped where a gradient is not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = rig.model.weight.detach().clone()
    for step in rig.loop(until=2):
        for (x,) in step.micro_batches():
            bad = torch.inf if step.number == 1 and step.leaf == 1 else 1.0
            step.backward((rig.model(x) * bad).square().mean(), scaler)
        step.apply(rig.optimizer, scaler=scaler)
        assert torch.equal(rig.model.weight, before) == (step.number == 1)
    assert scaler.get_scale() == 2.0


def spoiled(rig: Rig, where: str, loop: Steps) -> list[list[int | None]]:
    """Train with something that is not finite in micro-batch 1 of step 2; return all leaves."""
    seen = []
    for step in loop:
        leaves = []
        for (x,) in step.micro_batches():
            leaves.append(step.leaf)
            loss = rig.model(x).square().mean()
            if step.number == 2 and step.leaf == 1:
                # The gradient of a root at 0 is infinite, the root itself is not.
                zero = 0 * rig.model.weight.sum()
                loss = loss * torch.nan if where == "loss" else loss + zero.sqrt()
            step.backward(loss)
        step.apply(rig.optimizer)
        seen.append(leaves)
        assert all(one.isfinite().all() for one in rig.model.parameters())
    return seen


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_micro_batch_that_is_not_finite_is_an_error(rig: Rig, where: str) -> None:
    """It is named with its samples, and no weight has changed."""
    before: list[torch.Tensor] = []

    def note(optimizer: object, *_: object) -> None:
        before[:] = [rig.model.weight.detach().clone()]

    rig.optimizer.register_step_post_hook(note)
    with pytest.raises(NotFiniteError, match=r"step 2: .* micro-batch 1 \(samples 6, 7\)"):
        spoiled(rig, where, rig.loop(shuffle=False))
    assert torch.equal(rig.model.weight, before[0])


@pytest.mark.parametrize(("where", "again"), [("loss", 1), ("gradient", 2)])
def test_it_can_be_left_out(
    rig: Rig, where: str, again: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of sum and count; a gradient takes another time to be found."""
    seen = spoiled(rig, where, rig.loop(shuffle=False, until=2, on_bad_batch="skip"))
    assert seen == [[0, 1], [0, 1, *[0, 1] * (again - 1), 0]]
    assert "step 2: not finite" in caplog.text and "left out" in caplog.text
    other = Rig()
    for step in other.loop(shuffle=False, until=2):
        for (x,) in step.micro_batches():
            # Twice the loss of one micro-batch, and none of the other, has the same mean.
            factor = 1.0 if step.number == 1 else 2.0 * (step.leaf == 0)
            step.backward(other.model(x).square().mean() * factor)
        step.apply(other.optimizer)
    other.close()
    assert torch.allclose(rig.model.weight, other.model.weight, rtol=1e-6)
    assert rig.reported[1][1]["skipped"] == 1
    assert rig.reported[1][1]["loss"] == pytest.approx(other.reported[1][1]["loss"])


def test_not_all_can_be_left_out(rig: Rig) -> None:
    """Neither all of a step, nor some of each step."""
    with pytest.raises(NotFiniteError, match=r"micro-batch 0 .*, 1 "):
        for step in rig.loop(on_bad_batch="skip"):
            for (x,) in step.micro_batches():
                step.backward(rig.model(x).mean() * torch.nan)
    with pytest.raises(NotFiniteError, match=r"^step 11: "):
        for step in rig.loop(on_bad_batch="skip", until=20):
            for (x,) in step.micro_batches():
                step.backward(rig.model(x).mean() * (1.0 if step.leaf else torch.nan))
            step.apply(rig.optimizer)


def test_it_ends_where_the_job_is_to_end(rig: Rig) -> None:
    """After the step that is under way."""
    loop = rig.loop(until=5)
    for step in loop:
        for (x,) in step.micro_batches():
            step.backward(rig.model(x).square().mean())
        step.apply(rig.optimizer)
        if step.number == 2:
            rig.preempt.request("a test")
    assert (loop.done, loop.preempted) == (2, True)
    assert list(rig.loop()) == []


def test_a_loop_can_be_left_and_another_begun(rig: Rig) -> None:
    """In mid-step, too; two at once are refused, and steps count on."""
    for step in rig.loop(until=5):
        if step.number == 3:
            with pytest.raises(ContextError, match="inside of another loop"):
                rig.loop()
            break
        for (x,) in step.micro_batches():
            step.backward(rig.model(x).square().mean())
        step.apply(rig.optimizer)
    threads = torch.get_num_threads()
    for step in rig.loop(until=1):
        assert torch.get_num_threads() == 1
        for (x,) in step.micro_batches():
            step.backward(rig.model(x).square().mean())
        step.apply(rig.optimizer)
    assert torch.get_num_threads() == threads
    assert [number for number, _ in rig.reported] == [1, 2, 3]


def misuse(rig: Rig, what: str) -> None:
    """Do something wrong in a step."""
    loss = torch.ones((), requires_grad=True)
    for step in rig.loop():
        for (x,) in step.micro_batches():
            if what == "nothing":
                continue
            if what == "a vector":
                step.backward(rig.model(x))
            if what == "a number":
                step.backward(1.0)  # type: ignore[arg-type]
            if what == "no gradient":
                step.backward(rig.model(x).detach().mean())
            step.backward(rig.model(x).square().mean())
            if what == "two of a leaf":
                step.backward(rig.model(x).square().mean())
            if what == "some":
                break
        if what == "outside":
            step.backward(loss)
        if what == "all twice":
            next(step.micro_batches())
        if what == "no apply":
            continue
        if what == "no optimizer":
            step.apply()
        if what == "another optimizer":
            step.apply(torch.optim.SGD([loss], 0.1))
        step.apply(rig.optimizer)
        step.apply(rig.optimizer)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "micro-batch 0 was given out and got no backward"),
        ("a vector", r"this has the shape \(2, 1\): take its mean"),
        ("a number", "this is float"),
        ("no gradient", "computed without gradients"),
        ("two of a leaf", "twice for one"),
        ("outside", "without a micro-batch"),
        ("some", "before all micro-batches are computed"),
        ("all twice", "micro_batches.* is called twice"),
        ("no apply", "its apply.* was not called"),
        ("no optimizer", "takes the optimizers of the state"),
        ("another optimizer", "takes the optimizers of the state"),
        ("", "apply.* is called twice"),
    ],
)
def test_misuse_is_refused(rig: Rig, what: str, words: str) -> None:
    """In the step in which it is, with what to do."""
    with pytest.raises(ContextError, match=f"^step 1: .*{words}"):
        misuse(rig, what)


def test_a_thread_may_not_train(rig: Rig) -> None:
    """Its random numbers would be another thread's, too."""
    error = in_threads(range(1), lambda _: rig.loop()).errors[0]
    assert "in the main thread" in str(error)
