"""The law of every parser: a text that was cut off or garbled gives an error, or the same machine; never another
one.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensjax._errors import ClusterError
from lensjax.topology.discover import ibnet, kubernetes, nccl_xml, nvidia_smi, slurm

TEXTS = {path.name: path.read_text() for path in sorted((Path(__file__).parent / "texts").iterdir())}
LABELS = {"node.kubernetes.io/instance-type": "p5.48xlarge"}
NODES = json.dumps({"items": [{"metadata": {"name": f"n{i}", "labels": LABELS}} for i in range(4)]}, indent=1)
CONF = "SwitchName=l1 Nodes=n[1-2]\nSwitchName=l2 Nodes=n[3-4]\nSwitchName=s Switches=l[1-2]\n"
JOB = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_GPUS_ON_NODE": "8"}


def parse(name, text):
    """What the text says, as something that compares."""
    if name.startswith("smi"):
        return nvidia_smi.parse(text)
    if name.startswith("nccl"):
        return nccl_xml.parse(text)
    if name.startswith("ib"):
        return ibnet.parse(text)
    return kubernetes.parse(text) if name == "nodes" else slurm.discover(JOB, "p5", text)


CASES = {**TEXTS, "nodes": NODES}


@pytest.mark.parametrize("name", list(CASES))
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_text_that_was_cut_off_gives_an_error_or_the_same(name, data):
    whole = CASES[name]
    cut = data.draw(st.integers(0, len(whole)))
    try:
        found = parse(name, whole[:cut])
    except ClusterError as e:
        assert e.message
    else:
        assert found == parse(name, whole)


@pytest.mark.parametrize("name", [*CASES, "conf"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_garbled_text_raises_nothing_but_a_cluster_error(name, data):
    lines = (CONF if name == "conf" else CASES[name]).splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        how = data.draw(st.sampled_from(["drop", "twice", "cut", "noise", "swap"]))
        where = data.draw(st.integers(0, len(line)))
        noise = data.draw(st.text(st.sampled_from('XNV[]"<>=,:x0 9\t#\\é'), max_size=4))
        other = data.draw(st.integers(0, len(lines) - 1))
        replacement = {"drop": [], "twice": [line, line], "cut": [line[:where]], "swap": [lines[other]]}
        lines[at : at + 1] = replacement.get(how, [line[:where] + noise + line[where:]])
        if not lines:
            break
    try:
        parse(name, "\n".join(lines))
    except ClusterError as e:
        assert e.message
