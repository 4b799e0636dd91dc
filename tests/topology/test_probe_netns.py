"""The probe on a real slow network: two processes in two network namespaces, a rate-limited link between them."""

import json

import pytest

from tests.topology import netns

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def possible():
    reason = netns.missing()
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize(("rate", "bytes_per_second"), [("100mbit", 12.5e6), ("400mbit", 50e6)])
def test_probe_finds_two_tiers_and_the_rate_of_the_slow_link(rate, bytes_per_second, tmp_path):
    command = ["-m", "lensjax.cli", "probe", "--coordinator", f"{netns.ADDRESS}.1:31993", "--processes", "2"]
    command += ["--emulate", "4", "--largest", "2MiB", "--out", str(tmp_path / "found.json"), "--json"]
    with netns.slow_link(rate, "ljp") as names:
        runs = [netns.start(name, [*command, "--process", str(i)], {}) for i, name in enumerate(names)]
        try:
            outputs = [run.communicate(timeout=400) for run in runs]
        finally:
            for run in runs:
                run.kill()
    assert [run.returncode for run in runs] == [0, 0], outputs
    found = json.loads(outputs[0][0])
    inner, outer = found["tiers"]
    assert (inner["size"], outer["size"]) == (4, 8)
    assert outer["nic_sharing"] == 4  # four devices of a host share the one link
    assert inner["bandwidth"] > 4 * outer["bandwidth"]
    assert outer["bandwidth"] * 4 == pytest.approx(bytes_per_second, rel=0.15)
    assert json.loads((tmp_path / "found.json").read_text())["tiers"][1]["bandwidth"] == pytest.approx(
        outer["bandwidth"]
    )
