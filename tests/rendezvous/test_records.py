"""Records come back as they were written; whatever else comes is refused with its sender named."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from elaunch.rendezvous.plan import (
    AgentState,
    Cause,
    JobSeen,
    Node,
    NodeStatus,
    Phase,
    Plan,
    PlanCheckpoint,
    WorkerFailure,
)
from elaunch.rendezvous.records import (
    VERSIONS,
    RecordError,
    decode_agent,
    decode_plan,
    encode,
    encode_nodes,
    encode_plan,
    key_of,
)
from elaunch.store.protocol import Post
from tests.tables import each

SHORT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=20)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
COUNT = st.integers(0, 10_000)
FAILURE = st.builds(
    WorkerFailure,
    rank=st.integers(-1, 9999),
    exitcode=st.integers(-64, 255),
    text=TEXT,
    host=SHORT,
    age=st.floats(0, 1e6),
    node=SHORT,
)
SEEN = st.builds(
    JobSeen,
    job=SHORT,
    phase=st.sampled_from(get_args(Phase)),
    round=st.integers(-1, 100),
    restarts=COUNT,
    step=st.none() | COUNT,
    lost=st.booleans(),
)
AGENTS = st.builds(
    NodeStatus,
    host=SHORT,
    addr=SHORT,
    port=st.integers(0, 65535),
    slots=st.integers(0, 64),
    role=SHORT,
    hint=st.none() | COUNT,
    facts=st.dictionaries(SHORT, SHORT, max_size=4),
    state=st.sampled_from(get_args(AgentState)),
    round=st.integers(-1, 100),
    failure=st.none() | FAILURE,
    reason=TEXT,
    exit_code=st.none() | st.integers(0, 255),
    note=TEXT,
    seen=st.none() | SEEN,
    seq=COUNT,
    peer_port=st.integers(0, 65535),
)
NODES = st.builds(Node, SHORT, SHORT, SHORT, st.integers(0, 64), SHORT, st.integers(0, 65535))
PLANS = st.builds(
    Plan,
    job=SHORT,
    round=st.integers(-1, 100),
    phase=st.sampled_from(get_args(Phase)),
    reason=TEXT,
    cause=st.sampled_from(get_args(Cause)),
    nodes=st.lists(NODES, max_size=5).map(tuple),
    spares=st.lists(SHORT, max_size=3).map(tuple),
    joining=st.lists(SHORT, max_size=3).map(tuple),
    master_port=st.integers(0, 65535),
    checkpoint=st.none() | st.builds(PlanCheckpoint, TEXT, st.integers(-5, 10**12), SHORT),
    restarts=COUNT,
    failure=st.none() | FAILURE,
    exit_code=st.none() | st.integers(0, 255),
)
SECRETS = st.none() | st.binary(min_size=1, max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
AGENT = NodeStatus("node1", "10.0.0.1", 29500, 8)


def post_of(plan: Plan, secret: bytes | None = None, version: int = 3) -> Post:
    """Return a plan as a store has it."""
    nodes = encode_nodes(plan.nodes)
    return Post(version, encode_plan(plan, secret, version, nodes), nodes)


@pytest.mark.slow
@given(AGENTS, SECRETS)
def test_an_agent_comes_back(record: NodeStatus, secret: bytes | None) -> None:
    """Whatever it says."""
    assert decode_agent(encode(record, secret, "a1"), secret, "a1") == record


@pytest.mark.slow
@given(PLANS, SECRETS)
def test_a_plan_comes_back(plan: Plan, secret: bytes | None) -> None:
    """Commas and equal values in its columns of nodes included."""
    assert decode_plan(post_of(plan, secret), secret, "a1") == plan


def read(raw: bytes, plan: bool, secret: bytes | None = None) -> None:
    """Read it as an agent's record, or as a plan."""
    if plan:
        decode_plan(Post(3, raw), secret, "a1")
    else:
        decode_agent(raw, secret, "a1")


@given(st.binary(max_size=200), SECRETS)
@example(b"[" * 60_000, None)
@example(b'{"elaunch":3,"kind":"agent","port":' + b"1" * 5000 + b"}", None)
@example('{"elaunch":3}'.encode("utf-16"), None)
def test_any_bytes_are_refused(raw: bytes, secret: bytes | None) -> None:
    """With a RecordError that names the sender, and nothing else."""
    for plan in (False, True):
        with pytest.raises(RecordError, match="the record of a1 is refused: "):
            read(raw, plan, secret)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(Plan.__struct_fields__), JSON), st.booleans())
def test_any_fields_are_read_or_refused(said: dict[str, Any], plan: bool) -> None:
    """A record of the right frame with anything in its fields."""
    kind = "plan" if plan else "agent"
    frame = {"elaunch": VERSIONS[kind], "kind": kind}
    raw = json.dumps({**frame, **said}).encode()
    try:
        read(raw, plan)
    except RecordError as exc:
        assert str(exc).isprintable()


def spoil(**said: Any) -> bytes:
    """Return an agent's record with other values."""
    good = json.loads(encode(AGENT, None, "a1"))
    return json.dumps({**good, **said}).encode()


@each(
    ("raw", "secret", "problem"),
    [
        (spoil(port="x"), None, "its port is 'x': expected int, got str"),
        (spoil(port=True), None, "its port is True: expected int, got bool"),
        (spoil(port=1.0), None, "its port is 1.0: expected int, got float"),
        (spoil(port=-1), None, "its port is -1: expected int >= 0"),
        (spoil(host="a\nb"), None, "its host is 'a\\nb', not one line"),
        (spoil(host="x" * 1001), None, "its host is 'xxx"),
        (spoil(hint=-1), None, "its hint is -1: expected int >= 0"),
        (spoil(hint=10**400), None, "its hint is 1000"),
        (spoil(peer_port="29500"), None, "its peer_port is '29500': expected int, got str"),
        (spoil(peer_port=65536), None, "its peer_port is 65536: expected int <= 65535"),
        (spoil(peer_port=[29500]), None, "its peer_port is [29500]: expected int, got array"),
        (spoil(state="dead"), None, "its state is 'dead': invalid enum value 'dead'"),
        (spoil(extra=1), None, "object contains unknown field extra"),
        (spoil(**{"\x1b" * 90: 1}), None, "object contains unknown field \\x1b"),
        (spoil(elaunch=2), None, "it is of version 2, this agent reads 3"),
        (spoil(kind="plan"), None, "it is of the kind 'plan', not 'agent'"),
        (spoil(failure={"rank": 1}), None, "its failure is {'rank': 1}: object missing required"),
        (spoil(failure={"rank": 1, "exitcode": 1, "x": 1}), None, "its failure is {'rank': 1, "),
        (spoil(seen={"job": "a", "phase": "over", "round": "1"}), None, "its seen is {'job': 'a'"),
        (spoil(facts={"a": 1}), None, "its facts is {'a': 1}: expected str, got int"),
        (spoil(facts={"path": "a\nb"}), None, "its facts is 'a\\nb', not one line"),
        (spoil(facts={"a\x1b": ""}), None, "its facts is 'a\\x1b', not one line"),
        (spoil(facts={str(n): "" for n in range(101)}), None, "its facts is {'0': ''"),
        (spoil(note="\ud800"), None, "it is not JSON (DecodeError)"),
        (b'{"elaunch":3,"kind":"agent","host":"h"}', None, "object missing required field addr"),
        (b'{"a":1}', None, "it is no record of elaunch"),
        (b"\x80\x04K\x01.", None, "it is not JSON"),
        (spoil(note="x" * 70_000), None, "bytes, more than 65,536"),
        (encode(AGENT, None, "a1"), b"s", "it is not signed; start every agent with --rdzv-secret"),
        (encode(AGENT, b"s", "a1"), None, "it is signed, and this agent was given no"),
        (encode(AGENT, b"other", "a1"), b"s", "its signature is wrong"),
        (encode(AGENT, b"s", "a1")[:-2] + b"9}", b"s", "its signature is wrong"),
    ],
)
def test_what_is_wrong_is_said(raw: bytes, secret: bytes | None, problem: str) -> None:
    """One row per rule."""
    with pytest.raises(RecordError) as caught:
        decode_agent(raw, secret, "a1")
    assert str(caught.value).startswith(f"the record of a1 is refused: {problem}") or (
        problem in str(caught.value)
    )


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ("65536", "its nodes.peer_port are no numbers: Expected int <= 65535"),
        ("-1", "its nodes.peer_port are no numbers: Expected int >= 0"),
        ("1" * 5000, "its nodes.peer_port are no numbers: "),
        ("\u0661", "its nodes.peer_port are no numbers: Expected int, got str"),
        ("1\n", "its nodes is '1\\n', not one line"),
        ("1,2", "the columns of its nodes differ in length"),
        (29500, "its nodes.peer_port is 29500: expected str | object | array, got int"),
        ([29500], "its nodes.peer_port is [29500]: expected str, got int"),
        (
            {"all": "1", "number": 10**9},
            "its nodes.peer_port is {'all': '1', 'number': 1000000000}",
        ),
        (None, "its nodes: object missing required field peer_port"),
    ],
)
def test_what_is_wrong_with_a_port_of_a_node_is_said(column: object, problem: str) -> None:
    """No agent calls a port that is none, whoever wrote the plan."""
    said = json.loads(encode_nodes((Node("a", "h", "10.0.0.1", 8, "x", 29500),)))
    said["peer_port"] = column
    if column is None:
        del said["peer_port"]
    nodes = json.dumps(said).encode()
    with pytest.raises(RecordError) as caught:
        decode_plan(Post(3, encode_plan(Plan("job"), None, 3, nodes), nodes), None, "a1")
    assert str(caught.value).startswith(f"the record of a1 is refused: {problem}")


@pytest.mark.parametrize("mark", ["\n", "\x1b", "\x7f", "\u2028"])
@pytest.mark.parametrize("escaped", [True, False])
def test_a_node_of_several_lines_is_refused(mark: str, escaped: bool) -> None:
    """However its writer puts them into JSON."""
    nodes = encode_nodes((Node("a", "h@", "10.0.0.1", 8, "x", 29500),))
    written = f"\\u{ord(mark):04x}" if escaped else mark
    nodes = nodes.replace(b"@", written.encode())
    with pytest.raises(RecordError, match=r"is refused: its nodes is .*, not one line|is not JSON"):
        decode_plan(Post(3, encode_plan(Plan("job"), None, 3, nodes), nodes), None, "a1")


def test_what_nobody_could_read_is_not_written() -> None:
    """The writer is refused, not every reader."""
    with pytest.raises(RecordError, match="this agent"):
        encode(replace(AGENT, note="\ud800"), None, "a1")
    with pytest.raises(RecordError, match="this agent"):
        encode(replace(AGENT, host="a\nb"), None, "a1")


def test_a_plan_of_4096_nodes_is_small() -> None:
    """And read fast enough for 4,096 readers; CPU time, which others on the machine leave alone."""
    nodes = tuple(
        Node(f"{n:06x}", f"node-{n:05d}", f"10.12.{n // 256}.{n % 256}", 8, "default", 30000 + n)
        for n in range(4096)
    )
    plan = Plan("job", nodes=nodes, reason="first start: 4,096 nodes, 32,768 workers")
    post = post_of(plan, b"s")
    assert len(post.value) < 300 and len(post.nodes) < 200_000
    began = time.thread_time()
    found = decode_plan(post, b"s", "a1")
    assert found.node_rank("000fff") == 4095 and found.node_rank("0ff") is None
    assert time.thread_time() - began < 0.1
    assert found == plan and found.nodes[7] == nodes[7] and found.nodes[9:11] == nodes[9:11]
    after = replace(plan, phase="ending", reason="worker rank 8 exited with 1")
    again = decode_plan(Post(4, post_of(after, b"s", 4).value), b"s", "a1", found.nodes)
    assert again.nodes is found.nodes


def test_nodes_that_are_not_those_of_the_plan_are_refused() -> None:
    """Whether the store has lost them or another process has written there."""
    nodes = tuple(Node(name, "h", "10.0.0.1", 8, "x", 29500) for name in ("a", "b"))
    plan, other = post_of(Plan("job", nodes=nodes), b"s"), encode_nodes(nodes[:1])
    for listed in (b"", other, other[:-1]):
        with pytest.raises(RecordError, match="the list of its nodes is not there, or is that"):
            decode_plan(replace_nodes(plan, listed), b"s", "a1")


def replace_nodes(post: Post, nodes: bytes) -> Post:
    """Return the same plan with other nodes."""
    return Post(post.version, post.value, nodes)


@pytest.mark.parametrize(("plan", "version", "reads"), [(True, 1, 4), (True, 3, 4), (False, 2, 3)])
def test_a_record_of_another_version_is_refused(plan: bool, version: int, reads: int) -> None:
    """Before any of its fields is looked at; the sentence says what to do."""
    raw = json.dumps({"elaunch": version, "kind": "plan" if plan else "agent", "port": 1})
    with pytest.raises(RecordError) as caught:
        read(raw.encode(), plan)
    assert str(caught.value) == (
        f"the record of a1 is refused: it is of version {version}, this agent reads {reads}; "
        "install the same version of elaunch on every node"
    )


def test_a_signature_is_good_for_one_place_in_one_run() -> None:
    """What was signed once is refused as another version, under another name, in another run."""
    key, other = key_of(b"s", "mnist"), key_of(b"s", "mnist-2")
    plan, agent = post_of(Plan("job"), key, 7), encode(AGENT, key, "a1")
    assert decode_plan(plan, key, "a1") == Plan("job") and decode_agent(agent, key, "a1") == AGENT
    assert key_of(None, "mnist") is None
    with pytest.raises(RecordError, match="its signature is wrong"):
        decode_plan(Post(8, plan.value), key, "a1")
    with pytest.raises(RecordError, match="its signature is wrong"):
        decode_plan(plan, other, "a1")
    for wrong, name in ((key, "a2"), (other, "a1"), (b"s", "a1")):
        with pytest.raises(RecordError, match="its signature is wrong"):
            decode_agent(agent, wrong, name)
