"""The rule of what is kept: what it takes, how it travels to the workers."""

from __future__ import annotations

import pytest

import elaunch
from elaunch.checkpoint.records import Checkpoint, Keep


@pytest.mark.parametrize("uuid", ["", "f00"])
@pytest.mark.parametrize("at", ["/ck/step-00000010.r3", "s3://b/ck/step-00000010.r3.f00"])
def test_the_name_is_the_same_on_every_storage(at: str, uuid: str) -> None:
    """Retention, pins and saves in flight go by it."""
    found = Checkpoint(at, 10, "elaunch", 3, uuid)
    assert found.name == "step-00000010.r3"
    assert found.stage == ("step-00000010.r3.f00" if uuid else "")
    assert Checkpoint("/ck/step_10.pt", 10, "torch.save").name == "step_10.pt"


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"last": 0}, r"Keep\(last=0\): a whole number, 1 or more"),
        ({"every": -5}, r"Keep\(every=-5\)"),
        ({"last": True}, r"Keep\(last=True\)"),
        ({"last": 2.0}, r"Keep\(last=2\.0\)"),
        ({"best": " "}, r"Keep\(best=' '\): the name of a metric"),
        ({"best": "loss", "mode": "largest"}, r"mode='largest'\): 'min' or 'max'"),
    ],
)
def test_what_means_nothing_is_refused(parts: dict[str, object], told: str) -> None:
    """By the name of the part, with the value."""
    with pytest.raises(ValueError, match=told):
        Keep(**parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rule",
    [Keep(), Keep(last=3), Keep(every=1000), Keep(2, 10, "eval/acc: top", "max"), Keep(best="ö")],
)
def test_it_travels_as_json(rule: Keep) -> None:
    """As the variable ELAUNCH_CHECKPOINT_KEEP."""
    assert Keep.from_json(rule.to_json()) == rule
    assert bool(rule) == (rule != Keep())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1]", "is not a JSON object with last, every, best and mode"),
        ('{"lats": 3}', "unknown key 'lats'"),
        ('{"last": "3"}', "a whole number, 1 or more"),
        ('{"last": 0}', "a whole number, 1 or more"),
        ("{", "Expecting property name"),
    ],
)
def test_other_json_is_refused(text: str, told: str) -> None:
    """Whoever wrote the variable by hand learns what is wrong."""
    with pytest.raises(ValueError, match=told):
        Keep.from_json(text)


def test_an_empty_text_is_no_rule() -> None:
    """The variable may be set to nothing."""
    assert Keep.from_json("") == Keep() and not Keep.from_json(" ")


def test_in_words() -> None:
    """As the dry run and the log say it."""
    assert Keep(3, 100, "loss").describe() == (
        "the newest 3, those at multiples of 100 steps, the one with the best loss (min)"
    )
    assert (Keep().describe(), Keep(last=1).describe()) == ("all", "the newest")


def test_it_is_public() -> None:
    """``elaunch.Keep``."""
    assert elaunch.Keep is Keep
