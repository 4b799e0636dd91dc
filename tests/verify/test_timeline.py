"""Laws of the timeline, on random schedules: nothing is faster than what it is made of."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensjax.topology.cluster import Cluster
from lensjax.verify.collectives import collectives
from lensjax.verify.hlo import parse_hlo
from lensjax.verify.picture import draw
from lensjax.verify.prices import Priced
from lensjax.verify.timeline import COMPUTE, timeline
from lensjax.verify.trace import trace_events, write_trace

CLUSTER = Cluster.parse("dgx-h100:2")
GROUPS = {"inside": "[2,8]<=[16]", "across": "[8,2]<=[2,8]T(1,0)", "all": "[1,16]<=[16]"}

_HEAD = "HloModule m, is_scheduled=true, num_partitions=16\n\n%add (a: bf16[], b: bf16[]) -> bf16[] {\n"
_HEAD += "  %a = bf16[] parameter(0)\n  %b = bf16[] parameter(1)\n  ROOT %c = bf16[] add(%a, %b)\n}\n"


def computation(name, items, entry=False, loop=None):
    """A chain of matmuls with collectives of earlier results beside it; `items`: (what, groups)."""
    lines = [f"  %{name}.x = bf16[1024,1024]{{1,0}} parameter(0)"]
    last, open_ = f"{name}.x", []
    for i, (kind, value) in enumerate(items):
        at = f"{name}.{i}"
        if kind == "dot":
            lines.append(
                f"  %{at} = bf16[1024,1024]{{1,0}} dot(%{last}, %{last}), "
                f"lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
            )
            last = at
        elif kind == "start":
            lines.append(
                f"  %{at} = bf16[1024,1024]{{1,0}} all-reduce-start(%{last}), "
                f"replica_groups={GROUPS[value]}, to_apply=%add"
            )
            open_.append(at)
        elif kind == "done" and open_:
            start = open_.pop(0)
            lines.append(f"  %{at} = bf16[1024,1024]{{1,0}} all-reduce-done(%{start})")
            last = at if value == "inside" else last
        elif kind == "sync":
            lines.append(
                f"  %{at} = bf16[1024,1024]{{1,0}} all-reduce(%{last}), replica_groups={GROUPS[value]}, to_apply=%add"
            )
            last = at
    for i, start in enumerate(open_):
        lines.append(f"  %{name}.d{i} = bf16[1024,1024]{{1,0}} all-reduce-done(%{start})")
    if loop:
        lines.append(
            f"  %{name}.w = bf16[1024,1024]{{1,0}} while(%{last}), condition=%cond, body=%body, "
            f'backend_config={{"known_trip_count":{{"n":"{loop}"}}}}'
        )
        last = f"{name}.w"
    lines.append(f"  ROOT %{name}.r = bf16[1024,1024]{{1,0}} bitcast(%{last})")
    head = f"{'ENTRY ' if entry else ''}%{name} (p: bf16[1024,1024]) -> bf16[1024,1024] {{"
    return "\n".join([head, *lines, "}"])


_COND = (
    "%cond (p: bf16[1024,1024]) -> pred[] {\n  %p = bf16[1024,1024] parameter(0)\n  ROOT %k = pred[] constant(true)\n}"
)
_ITEMS = st.lists(
    st.tuples(st.sampled_from(("dot", "dot", "start", "done", "sync")), st.sampled_from(sorted(GROUPS))), max_size=12
)


@st.composite
def modules(draw):
    loop = draw(st.one_of(st.none(), st.integers(1, 5)))
    body = computation("body", draw(_ITEMS))
    return "\n\n".join([_HEAD, body, _COND, computation("main", draw(_ITEMS), entry=True, loop=loop)])


def lines_of(text, overlap=True):
    module = parse_hlo(text)
    priced = Priced(CLUSTER, 16)
    return timeline(module, collectives(module), CLUSTER.device, priced.price(), overlap=overlap)


@settings(max_examples=150, deadline=None)
@given(modules())
def test_laws(text):
    line, alone = lines_of(text), lines_of(text, overlap=False)
    tiny = 1e-12
    assert line.step >= line.longest - tiny
    assert all(line.step >= busy - tiny for busy in line.busy.values())
    assert line.step <= alone.step + tiny
    assert alone.step == pytest.approx(sum(alone.busy.values()), abs=tiny)
    assert line.step == pytest.approx(line.compute + sum(line.exposed.values()), abs=tiny)
    assert all(line.exposed[t] <= line.busy[t] + tiny for t in line.exposed)


@settings(max_examples=50, deadline=None)
@given(modules())
def test_events_tile_the_step(text):
    line = lines_of(text)
    by_stream = {}
    for start, event in line.block.flat():
        by_stream.setdefault(event.stream, []).append((start, start + event.seconds))
    for stream, spans in by_stream.items():
        spans.sort()
        assert spans[-1][1] <= line.step + 1e-12
        assert sum(b - a for a, b in spans) == pytest.approx(line.busy[stream])
        assert all(b <= c + 1e-12 for (_, b), (c, _) in itertools.pairwise(spans))


def test_a_loop_takes_its_trips():
    body = [("dot", ""), ("sync", "inside")]
    times = []
    for loop in (1, 2, 7):
        text = "\n\n".join([_HEAD, computation("body", body), _COND, computation("main", [], entry=True, loop=loop)])
        times.append(lines_of(text).step)
    assert times[1] == pytest.approx(2 * times[0]) and times[2] == pytest.approx(7 * times[0])


def test_what_is_hidden_costs_nothing_and_what_shares_a_tier_waits():
    dots = [("dot", "")] * 40
    hidden = computation("main", [("start", "inside"), *dots, ("done", "inside")], entry=True)
    bare = computation("main", dots, entry=True)
    assert lines_of(_HEAD + hidden).step == pytest.approx(lines_of(_HEAD + bare).step)
    one = lines_of(_HEAD + computation("main", [("sync", "inside")], entry=True)).step
    two = computation("main", [("start", "inside"), ("start", "inside")], entry=True)
    assert lines_of(_HEAD + two).step == pytest.approx(2 * one)
    apart = computation("main", [("start", "inside"), ("start", "across")], entry=True)
    across = lines_of(_HEAD + computation("main", [("sync", "across")], entry=True)).step
    assert lines_of(_HEAD + apart).step == pytest.approx(max(one, across))


def test_trace_and_picture(tmp_path):
    text = _HEAD + computation("main", [("dot", ""), ("start", "all"), ("dot", ""), ("done", "all")], entry=True)
    line = lines_of(text)
    write_trace(line, tmp_path / "t.json")
    made = json.loads((tmp_path / "t.json").read_text())
    assert made == json.loads(json.dumps(trace_events(line)))
    spans = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert {e["cat"] for e in spans} == {COMPUTE, "rail"}
    assert all(e["dur"] > 0 and e["ts"] >= 0 and {"pid", "tid", "name"} <= set(e) for e in spans)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(line.step * 1e6)
    draw(line, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_wait_with_other_work_at_hand_is_noted():
    """The same step with its collective first, then last: only the first could hide behind the matmuls."""
    from lensjax.verify.artifact import Artifact, Memory
    from lensjax.verify.audit import audit

    def notes(items):
        text = _HEAD + computation("main", items, entry=True)
        made = Artifact("cuda", "h100-80gb", 16, text, Memory(0, 0, 0, 0, 1))
        return [f.kind for f in audit(made, mesh={"d": 16}, cluster=CLUSTER).findings]

    # "across": the collective's result is read by nothing that follows.
    assert notes([("start", "across"), ("done", "across"), *[("dot", "")] * 30]) == ["could_move"]
    assert notes([*[("dot", "")] * 30, ("start", "across"), ("done", "across")]) == []
