"""What nodes have together: complete or not, and who lacks what."""

from __future__ import annotations

from elaunch.checkpoint.manifests import FileEntry
from elaunch.checkpoint.nodelocal import NodeFiles, unite


def entry(path: str, content: str = "a", size: int = 4) -> FileEntry:
    """Return a file."""
    return FileEntry(path, size, f"sha256:{content}")


A, B, COMMIT = entry("a"), entry("b"), entry("COMMIT")


def test_parts_on_two_nodes_make_a_checkpoint() -> None:
    """Each lacks what the other has, a third lacks all; COMMIT comes last."""
    wanted = (COMMIT, A, B)
    union = unite([NodeFiles((COMMIT, A), wanted), NodeFiles((B, COMMIT), wanted), NodeFiles()])
    assert union.missing == ()
    assert [one.entry for one in union.files] == [A, B, COMMIT]
    assert [one.entry for one in union.lacking(0)] == [B]
    assert [one.entry for one in union.lacking(1)] == [A]
    assert union.lacking(2) == union.lacking(-1) == union.files
    assert union.size == 12


def test_a_part_that_nobody_has_is_missing() -> None:
    """Also where everybody says that it should be there."""
    union = unite([NodeFiles((A,), (A, B)), NodeFiles((A,), (A, B))])
    assert union.missing == ("b",)


def test_another_content_is_not_the_part() -> None:
    """Nor is another size."""
    assert unite([NodeFiles((A,), (A, B)), NodeFiles((entry("b", "x"),), None)]).missing == ("b",)
    larger = NodeFiles((entry("b", "a", 5),), None)
    assert unite([NodeFiles((A,), (A, B)), larger]).missing == ("b",)


def test_what_is_needed_without_a_checksum_is_any_that_is_large_enough() -> None:
    """As .metadata of torch says it: and what lies beside it comes along."""
    wanted = (entry(".metadata"), FileEntry("r1", 4, ""), FileEntry("r2", 4, ""))
    short, whole, more = entry("r2", "x", 3), entry("r2", "y", 9), entry("notes.json")
    first = NodeFiles((entry(".metadata"), entry("r1"), short), wanted, format="dcp")
    assert unite([first]).missing == ("r2",)
    union = unite([first, NodeFiles((whole, more), None)])
    assert [one.entry for one in union.files] == [more, entry("r1"), whole, entry(".metadata")]
    assert [one.entry for one in union.lacking(0)] == [more, whole]
    assert union.format == "dcp"


def test_of_two_contents_all_get_the_first_nodes() -> None:
    """Two complete copies that differ: no rank starts from something else than the others."""
    one, other = entry("", "x"), entry("", "y")
    union = unite(
        [NodeFiles((one,), (one,)), NodeFiles((other,), (other,)), NodeFiles((one,), (one,))]
    )
    assert union.lacking(0) == union.lacking(2) == ()
    assert [whole.entry for whole in union.lacking(1)] == [one]


def test_a_node_that_cannot_tell_is_passed_by() -> None:
    """The next one's word counts; where nobody can tell, the reasons are given once each."""
    assert unite([NodeFiles((), None, "damaged"), NodeFiles((A,), (A,))]).missing == ()
    union = unite(
        [NodeFiles(problem="damaged"), NodeFiles(problem="damaged"), NodeFiles(problem="gone")]
    )
    assert union.missing == ("damaged", "gone")
    assert unite([NodeFiles()]).missing == ("nothing of it is on any node",)


def test_a_node_with_documents_of_its_own_keeps_them() -> None:
    """In elaunch's layout, where each may have committed by itself; who has no pair gets one."""
    manifest = entry("manifest.rank-00000.json")
    pairs = [(entry("metadata.json", who), entry("COMMIT", who)) for who in "xy"]
    own = [NodeFiles((manifest, *p), (manifest, *p), format="elaunch") for p in pairs]
    half = NodeFiles((manifest,), None, "metadata.json is another", "elaunch")
    union = unite([*own, half])
    assert union.lacking(0) == union.lacking(1) == ()
    assert [(one.entry, one.holders) for one in union.lacking(2)] == [
        (one, (0,)) for one in pairs[0]
    ]
