"""`ibnetdiscover` text: every switch and channel adapter of an InfiniBand fabric, port by port, with each cable's
rate.

Format: infiniband-diags, ibnetdiscover(8). Every cable is listed at both ends, which is what finds a text that was
cut off.
"""

from __future__ import annotations

import dataclasses
import re

from lensjax._errors import ClusterError
from lensjax.topology import catalogue
from lensjax.topology.discover.text import bad, clean, cut_off
from lensjax.topology.fabric import Fabric, Link, fabric
from lensjax.topology.hierarchy import Hierarchy, cluster_of

SOURCE = "ibnetdiscover"
_BLOCK = re.compile(r'^(Switch|Ca|Rt)\s+(\d+)\s+"([^"]+)"\s*(?:#\s*"([^"]*)")?')
_PORT = re.compile(
    r'^\[(\d+)\](?:\[ext \d+\])?(?:\([0-9a-fA-F]+\))?\s+"([^"]+)"\[(\d+)\](?:\[ext \d+\])?(?:\([0-9a-fA-F]+\))?'
)
_RATE = re.compile(r"\b(1|2|4|8|12)x(SDR|DDR|QDR|FDR10|FDR|EDR|HDR|NDR|XDR)\b")
# Data rate of one lane in Gbit/s after line coding: InfiniBand Trade Association roadmap.
_LANE = {"SDR": 2, "DDR": 4, "QDR": 8, "FDR10": 10, "FDR": 13.64, "EDR": 25, "HDR": 50, "NDR": 100, "XDR": 200}
_LATENCY = 2e-6  # half of NCCL's network hop (src/graph/tuning.cc hwLat, ring, LL128): a cable and a switch
_PREAMBLE = ("vendid=", "devid=", "sysimgguid=", "switchguid=", "caguid=", "rtguid=", "#", "DR path", "ibwarn:")
_CHASSIS = ("Chassis", "Non-Chassis")


@dataclasses.dataclass(frozen=True)
class Network:
    """`switches`: guid -> description; `adapters`: guid -> host name; `cables`: (guid, guid) -> bytes/s one
    direction.
    """

    switches: dict[str, str]
    adapters: dict[str, str]
    cables: dict[tuple[str, str], float]

    @property
    def hosts(self) -> list[str]:
        """Host names in natural order (node2 before node10)."""
        return sorted(set(self.adapters.values()), key=_natural)


def parse(text: str) -> Network:
    """The network in a text. Raises ClusterError with the line for what is malformed, and for a cable of which only
    one end is listed (the text was cut off).
    """
    blocks: dict[str, tuple[str, str]] = {}  # guid -> (kind, description)
    ports: dict[tuple[str, int], tuple[tuple[str, int], float, int]] = {}
    current, lines = None, clean(text).splitlines()
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith((*_PREAMBLE, *_CHASSIS)):
            continue
        if block := _BLOCK.match(line):
            current = block[3]
            if current in blocks:
                raise bad(SOURCE, number, line, f"one block for {current}")
            if block[1] == "Ca" and not (block[4] or "").strip():  # without it two adapters of a host are two hosts
                raise bad(SOURCE, number, line, 'Ca N "guid" # "host adapter"')
            blocks[current] = (block[1], block[4] or "")
        elif line.startswith("["):
            if current is None:
                raise bad(SOURCE, number, line, 'a line Switch N "guid" or Ca N "guid" above the ports')
            ports |= _port(line, current, number, ports)
        else:
            raise bad(SOURCE, number, line, "a block (Switch, Ca, Rt), a port ([1] ...) or a comment")
    if not blocks:
        raise ClusterError(f"{SOURCE}: no switch and no adapter", hint="paste its whole output")
    bare = next((guid for guid in blocks if guid not in {here for here, _ in ports}), None)
    if bare is not None:  # what has no cable is not discovered
        raise cut_off(SOURCE, len(lines), f"the ports of {bare}")
    cables = _cables(ports, blocks, len(lines))
    switches = {g: d for g, (kind, d) in blocks.items() if kind == "Switch"}
    adapters = {g: _host(d, g) for g, (kind, d) in blocks.items() if kind == "Ca" and "Aggregation" not in d}
    return Network(switches, adapters, cables)


def _port(line: str, guid: str, number: int, ports: dict) -> dict:
    match, rate = _PORT.match(line), _RATE.search(line)
    if not match or not rate:
        raise bad(SOURCE, number, line, '[port] "guid"[port] # "description" lid N 4xHDR')
    here = (guid, int(match[1]))
    if here in ports:
        raise bad(SOURCE, number, line, f"port {here[1]} once, it is at line {ports[here][2]}")
    return {here: ((match[2], int(match[3])), int(rate[1]) * _LANE[rate[2]] * 1e9 / 8, number)}


def _cables(ports: dict, blocks: dict, end: int) -> dict[tuple[str, str], float]:
    cables: dict[tuple[str, str], float] = {}
    for here, (there, rate, number) in ports.items():
        if there[0] not in blocks:
            raise cut_off(SOURCE, end, f"the block of {there[0]}, to which line {number} has a cable")
        back = ports.get(there)
        if back is None:
            raise cut_off(SOURCE, end, f"port {there[1]} of {there[0]}, to which line {number} has a cable")
        if back[0] != here or back[1] != rate:
            raise bad(SOURCE, back[2], f"{there} to {back[0]}", f"the other end of line {number}, {here}, at one rate")
        if here < there:
            pair = (here[0], there[0])
            cables[pair] = cables.get(pair, 0.0) + rate
    return cables


def _host(description: str, guid: str) -> str:
    """The host of an adapter: the first word of "node1 mlx5_0", or its guid."""
    return description.replace("'", " ").split()[0] if description.split() else guid


def _natural(name: str) -> list:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def discover(text: str, machine: str, hosts: list[str] | None = None) -> Hierarchy:
    """The cluster of the hosts on the fabric (or of those named), each a node of a catalogue machine."""
    network, found = parse(text), catalogue.machine(machine)
    names = network.hosts if hosts is None else hosts
    lost = [h for h in names if h not in network.adapters.values()]
    if lost or not names:
        raise ClusterError(
            f"{SOURCE}: no adapter of host {lost[0] if lost else '(none)'}",
            hint=f"it has {', '.join(network.hosts[:8])}",
        )
    one = catalogue.make(found, (1,))
    notes = [f"inside a node the links are the catalogue's for {found.name}: {SOURCE} sees only the network"]
    return cluster_of(_fabric(network, names, one), one.device, "ibnetdiscover", notes=notes)


def _fabric(network: Network, names: list[str], one) -> Fabric:
    """Devices behind their host's adapters: GPU i of n uses adapter i * adapters // n."""
    tier, links = one.tiers[-1], []
    for h, host in enumerate(names):
        own = sorted(g for g, name in network.adapters.items() if name == host)
        for i in range(one.devices):
            device, adapter = h * one.devices + i, own[i * len(own) // one.devices]
            links.append(Link(device, f"{host}/{tier.name}", tier.bandwidth, tier.latency / 2, tier.name))
            links.append(Link(device, adapter, one.device.host_bandwidth, _LATENCY, "pcie"))
    used = {g for g, name in network.adapters.items() if name in names}
    for (a, b), rate in network.cables.items():
        ends = [g for g in (a, b) if g not in network.switches]
        if all(g in used for g in ends):
            links.append(Link(a, b, rate, _LATENCY, "infiniband"))
    return fabric(len(names) * one.devices, links, SOURCE)
