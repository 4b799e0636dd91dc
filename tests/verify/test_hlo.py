"""The parser on whole texts of the supported compilers, and on damaged ones."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lensjax._errors import LensjaxError
from lensjax.verify.collectives import collectives
from lensjax.verify.hlo import NotHlo, parse_hlo
from lensjax.verify.hlo.shapes import arrays
from lensjax.verify.hlo.text import attribute, closing
from lensjax.verify.lines import user_frame

SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.hlo.gz"))


def read(path):
    return gzip.decompress(path.read_bytes()).decode()


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.name.removesuffix(".hlo.gz"))
def test_whole_texts(path):
    module = parse_hlo(read(path))
    assert module.devices == 8
    assert not module.unread
    found = collectives(module)
    assert not found.unknown
    assert found.collectives
    large = [c for c in found.collectives if c.payload > 1024]
    assert all(user_frame(c.stack) is not None for c in large)
    mine = [c for c in large if user_frame(c.stack).file.endswith("programs.py")]
    assert len(mine) >= 0.95 * len(large)


def test_loops_multiply():
    module = parse_hlo(read(next(p for p in SAMPLES if p.name.startswith("decoder-cuda-0.10"))))
    trips = {c.trips for c in collectives(module).collectives}
    assert trips == {1, 4}


def test_no_entry():
    with pytest.raises(NotHlo):
        parse_hlo("module @jit_f { }")


def test_attributes():
    tail = 'dimensions={0}, metadata={op_name="a}b" x=1}, calls=%c.1, window={size=3x3 pad=1_1x1_1}, '
    tail += "replica_groups=[2,4]<=[8]"
    assert attribute(tail, "dimensions") == "0"
    assert attribute(tail, "metadata") == 'op_name="a}b" x=1'
    assert attribute(tail, "calls") == "%c.1"
    assert attribute(tail, "window") == "size=3x3 pad=1_1x1_1"
    assert attribute(tail, "replica_groups") == "[2,4]<=[8]"
    assert attribute(tail, "nothing") is None
    assert closing("(a(b)", 0) == -1


def test_shapes():
    found = arrays("(bf16[8,512]{1,0}, (s4[3]{0:T(8)S(5)}, pred[]), /*index=2*/f8e4m3fn[<=7,2]{1,0})")
    assert [s.bytes for s in found] == [8192, 2, 1, 14]
    assert found[1].space == 5


_SMALL = """HloModule jit_f, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add, METADATA
  ROOT %t = (s32[], f32[8]) tuple(%i, %r)
}

%cond (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]) parameter(0)
  ROOT %k = pred[] constant(true)
}

ENTRY %main (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  %z = s32[] constant(0)
  %init = (s32[], f32[8]) tuple(%z, %x.1)
  %w = (s32[], f32[8]) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %g = f32[8]{0} get-tuple-element(%w), index=1
  %n = f32[8]{0} all-gather-v9(%g), replica_groups={{0,1,2,3}}
  ROOT %h = f32[8]{0} all-reduce(%n), replica_groups=ring(4), to_apply=%add
}
"""

_SMALL = _SMALL.replace("METADATA", 'metadata={op_name="jit(f)/sum" source_file="/home/user/a.py" source_line=7}')


def test_a_loop_an_old_style_line_and_two_unknowns():
    found = collectives(parse_hlo(_SMALL))
    (only,) = found.collectives
    assert (only.trips, only.payload, only.groups.tolist()) == (5, 32, [[0, 1], [2, 3]])
    assert str(only.stack[0]) == "/home/user/a.py:7"
    assert len(found.unknown) == 2
    assert "all-gather-v9" in found.unknown[0] and "ring(4)" in found.unknown[1]


def test_an_unknown_trip_count_is_said():
    found = collectives(parse_hlo(_SMALL.replace("known_trip_count", "other")))
    assert found.collectives[0].trips == 1
    assert any("trip count" in u for u in found.unknown)


@st.composite
def damaged(draw):
    """A text with lines lost, doubled, cut, or with characters changed."""
    lines = _SMALL.splitlines()
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(("lose", "double", "cut", "change", "insert")))
        if how == "lose" and len(lines) > 1:
            del lines[at]
        elif how == "double":
            lines.insert(at, lines[at])
        elif how == "cut":
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
        elif how == "change" and lines[at]:
            where = draw(st.integers(0, len(lines[at]) - 1))
            lines[at] = lines[at][:where] + draw(st.sampled_from('(){}[]",=%x0 -')) + lines[at][where + 1 :]
        elif how == "insert":
            lines.insert(at, draw(st.text(alphabet='abc(){}[]=%",0123456789 -', max_size=60)))
    return "\n".join(lines)


@settings(max_examples=400, deadline=None)
@given(damaged())
def test_damaged_texts_do_not_crash(text):
    try:
        found = collectives(parse_hlo(text))
    except LensjaxError:
        return
    assert all(c.trips >= 0 and c.payload >= 0 for c in found.collectives)


@pytest.mark.skipif(not SAMPLES, reason="no samples")
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_damaged_real_texts_do_not_crash(data):
    text = read(data.draw(st.sampled_from([p for p in SAMPLES if "convolutions" in p.name])))
    start = data.draw(st.integers(0, len(text) - 1))
    end = min(len(text), start + data.draw(st.integers(0, 5000)))
    try:
        collectives(parse_hlo(text[:start] + text[end:]))
    except LensjaxError:
        pass
