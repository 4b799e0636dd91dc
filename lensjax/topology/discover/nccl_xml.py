"""NCCL's topology XML (NCCL_TOPO_DUMP_FILE, or the NCCL_TOPO_FILE of a cloud image): CPUs, PCI tree, GPUs, NVLinks,
NICs.

Unlike `nvidia-smi topo -m` it tells link counts, PCIe generations and NIC speeds. Format: nccl src/graph/xml.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.parsers import expat

from lensjax._errors import ClusterError
from lensjax.topology import catalogue
from lensjax.topology.cluster import Device
from lensjax.topology.discover.text import bad, clean
from lensjax.topology.fabric import Fabric, Link, fabric
from lensjax.topology.hierarchy import Hierarchy, cluster_of

SOURCE = "NCCL topology XML"

# Bytes/s of one NVLink link in one direction by compute capability: NVIDIA datasheets (P100, V100, A100, H100, B200).
_NVLINK = {60: 20e9, 70: 25e9, 80: 25e9, 86: 14e9, 90: 25e9, 100: 50e9}
_DEVICE = {70: "V100-SXM2-32GB", 80: "A100-SXM4-80GB", 90: "H100-SXM5-80GB", 100: "B200-SXM6-180GB"}
_CPU_LINK = {"GenuineIntel": 10e9, "AuthenticAMD": 16e9}  # between sockets: NCCL src/graph/topo.h SKL_QPI_BW, AMD_BW
_SPEED = re.compile(r"^([0-9]+(?:\.[0-9]+)?) ?GT/s")
_SWITCH_CLASS = "0x068000"  # the PCI class of an NVSwitch
_LATENCY = {"nvlink": 1.9e-6, "pcie": 2.5e-6, "network": 4e-6}  # NCCL src/graph/tuning.cc hwLat, ring, LL128


def parse(text: str) -> Fabric:
    """The links of one node (or of the hosts that one file describes). Raises ClusterError with the line."""
    return _Reader(text).fabric()


def discover(text: str, device: str | None = None, nodes: int = 1) -> Hierarchy:
    """The cluster of `nodes` nodes like the one in the text; the device comes from the GPUs' compute capability
    unless its catalogue name is given.
    """
    reader, notes = _Reader(text), []
    found = catalogue.device(device) if device else _device(reader, notes)
    return cluster_of(reader.fabric(nodes), found, "nccl-xml", notes=[*notes, *reader.notes])


def _device(reader: _Reader, notes: list[str]) -> Device:
    kinds = sorted({reader.number(g, "sm") for g in reader.gpus})
    name = _DEVICE.get(kinds[0])
    if len(kinds) > 1 or name is None:
        raise ClusterError(
            f"{SOURCE}: GPUs of compute capability {', '.join(map(str, kinds))}",
            hint=f"known by it are {', '.join(map(str, _DEVICE))}; for others name a device of the catalogue",
        )
    notes.append(f"compute capability {kinds[0]} taken for {name}; pass device= for another")
    return catalogue.device(name)


class _Reader:
    def __init__(self, text: str):
        self.root, self.lines = _tree(clean(text))
        if self.root.tag != "system":
            raise bad(SOURCE, 1, f"<{self.root.tag}>", "<system>")
        if len(self.root) == 0 or any(e.tag not in ("cpu", "nic") for e in self.root):
            raise bad(SOURCE, 1, f"<system> of {[e.tag for e in self.root]}", "<cpu> elements inside")
        self.gpus = sorted(self.root.iter("gpu"), key=lambda g: (self.number(g, "rank", "dev"), id(g)))
        if not self.gpus:
            raise ClusterError(
                f"{SOURCE}: no <gpu> element", hint="dump it with NCCL_TOPO_DUMP_FILE from a job that uses GPUs"
            )
        self.notes: list[str] = []
        self._check_nvlinks()
        self.bus = {self.attribute(p, "busid").lower(): p for p in self.root.iter("pci")}
        self.gpu_at = {b: p.find("gpu") for b, p in self.bus.items() if p.find("gpu") is not None}
        for gpu in self.gpus:
            if not any(gpu is placed for placed in self.gpu_at.values()):
                raise bad(SOURCE, self.line(gpu), f"<gpu dev={gpu.get('dev')}>", "it alone in a <pci> of its own busid")

    def _check_nvlinks(self) -> None:
        """Each link once, with its count, in the GPU that has it."""
        inside = {id(link) for gpu in self.gpus for link in gpu.findall("nvlink")}
        for link in self.root.iter("nvlink"):
            if id(link) not in inside or self.number(link, "count") < 1:
                raise bad(
                    SOURCE, self.line(link), f"<nvlink count={link.get('count')}>", "in a <gpu>, with a count above 0"
                )
        for gpu in self.gpus:
            seen: set[str] = set()
            for link in gpu.findall("nvlink"):
                target = self.attribute(link, "target").lower()
                if target in seen and not set(target) <= set("0:.f"):
                    raise bad(SOURCE, self.line(link), f"nvlink to {target}", "each target once in a <gpu>")
                seen.add(target)

    def fabric(self, nodes: int = 1) -> Fabric:
        links: list[Link] = []
        for node in range(nodes):
            offset = node * len(self.gpus)
            name = {id(g): offset + i for i, g in enumerate(self.gpus)}
            links += [*self._pci(name, node), *self._nvlinks(name, node), *self._sockets(node)]
        links += self._network(nodes)
        return fabric(nodes * len(self.gpus), links, SOURCE)

    def _pci(self, name: dict[int, int], node: int) -> Iterator[Link]:
        for cpu in self.root.iter("cpu"):
            top = f"{node}/{self.cpu(cpu)}"
            todo = [(p, top) for p in cpu.findall("pci")]
            while todo:
                pci, above = todo.pop(0)
                gpu = pci.find("gpu")
                here = name[id(gpu)] if gpu is not None else f"{node}/pci{self.attribute(pci, 'busid').lower()}"
                yield Link(here, above, self._pcie_rate(pci), _LATENCY["pcie"] / 2, "pcie")
                todo += [(p, here) for p in pci.findall("pci")]

    def _pcie_rate(self, pci: ElementTree.Element) -> float:
        """Lanes times the rate of a lane, after line coding (8b/10b up to 5 GT/s, then 128b/130b)."""
        speed, width = _SPEED.match(pci.get("link_speed", "")), self.number(pci, "link_width", default=16) or 16
        if not speed:
            note = "a PCIe link without a known speed: taken for 8 GT/s x16"
            self.notes += [note] if note not in self.notes else []
            return 8e9 * 16 / 8 * 128 / 130
        rate = float(speed[1])  # GT/s
        if rate <= 0 or width < 1:
            raise bad(SOURCE, self.line(pci), f"{speed[0]} x{width}", "a speed and a width above 0")
        return rate * 1e9 * width / 8 * (0.8 if rate <= 5 else 128 / 130)

    def _nvlinks(self, name: dict[int, int], node: int) -> Iterator[Link]:
        seen: dict[tuple[int, int], int] = {}
        for gpu in self.gpus:
            here, sm = name[id(gpu)], self.number(gpu, "sm", default=70)
            each = next((_NVLINK[k] for k in sorted(_NVLINK, reverse=True) if k <= sm), 20e9)
            switched = 0
            for link in gpu.findall("nvlink"):
                count, target = self.number(link, "count", default=1), self.attribute(link, "target").lower()
                if link.get("tclass") == _SWITCH_CLASS or set(target) <= set("0:.f"):
                    switched += count
                elif target in self.gpu_at:
                    there = name[id(self.gpu_at[target])]
                    seen[min(here, there), max(here, there)] = count
                    self._same(gpu, target, count)
                elif not any(target in b for b in self.bus) and link.get("tclass", "").startswith("0x0302"):
                    raise bad(SOURCE, self.line(link), f"nvlink to {target}", "a bus id of a <gpu> in this file")
            if switched:
                yield Link(here, f"{node}/NVSwitch", switched * each, _LATENCY["nvlink"] / 2, "nvlink")
        each = _NVLINK.get(self.number(self.gpus[0], "sm", default=70), 25e9)
        yield from (Link(a, b, n * each, _LATENCY["nvlink"], "nvlink") for (a, b), n in seen.items())

    def _same(self, gpu: ElementTree.Element, target: str, count: int) -> None:
        """Both ends of a direct link tell it; they must agree."""
        own = next(b for b, g in self.gpu_at.items() if g is gpu)
        back = [n for n in self.gpu_at[target].findall("nvlink") if n.get("target", "").lower() == own]  # type: ignore
        if [self.number(n, "count", default=1) for n in back] != [count]:
            line = self.line(gpu)
            raise bad(SOURCE, line, f"{count} NVLinks from {own} to {target}", "the same number at the other end")

    def _sockets(self, node: int) -> Iterator[Link]:
        cpus = list(self.root.iter("cpu"))
        for cpu in cpus:
            top = f"{node}/{self.cpu(cpu)}"
            rate = _CPU_LINK.get(cpu.get("vendor", ""), 10e9)
            if len(cpus) > 1:
                yield Link(top, f"{node}/sockets{cpu.get('host_hash', '')}", rate, _LATENCY["pcie"] / 2, "upi")

    def _network(self, nodes: int) -> Iterator[Link]:
        hosts = len({c.get("host_hash", "") for c in self.root.iter("cpu")})
        if nodes * hosts < 2:
            return
        nets = list(self._nets())
        if not nets:
            raise ClusterError(
                f"{SOURCE}: {nodes} nodes but no <net>", hint="the dump of a job on several nodes has them"
            )
        for node in range(nodes):
            for place, net in nets:
                speed = self.number(net, "speed")  # Mbit/s
                if speed <= 0:
                    raise bad(SOURCE, self.line(net), f"net {net.get('name')} speed {speed}", "Mbit/s above 0")
                yield Link(f"{node}/{place}", "network", speed * 1e6 / 8, _LATENCY["network"] / 2, "network")

    def _nets(self) -> Iterator[tuple[str, ElementTree.Element]]:
        """(where it hangs, the NIC port): under a PCI device, or under a CPU for sockets."""
        for pci in self.root.iter("pci"):
            yield from ((f"pci{self.attribute(pci, 'busid').lower()}", net) for net in pci.findall("nic/net"))
        for cpu in self.root.iter("cpu"):
            yield from ((self.cpu(cpu), net) for net in cpu.findall("nic/net"))

    def cpu(self, element: ElementTree.Element) -> str:
        return f"cpu{self.attribute(element, 'numaid')}.{element.get('host_hash', '')}"

    def attribute(self, element: ElementTree.Element, key: str) -> str:
        value = element.get(key)
        if value is None:
            raise bad(SOURCE, self.line(element), f"<{element.tag}> without {key}", f"the attribute {key}")
        return value

    def number(self, element: ElementTree.Element, *keys: str, default: int | None = None) -> int:
        value = next((element.get(k) for k in keys if element.get(k) is not None), None)
        if value is None and default is not None:
            return default
        try:
            return int(value or "")
        except ValueError:
            raise bad(SOURCE, self.line(element), f"<{element.tag}> {keys[0]}={value!r}", "a whole number") from None

    def line(self, element: ElementTree.Element) -> int:
        return self.lines.get(id(element), 0)


def _tree(text: str) -> tuple[ElementTree.Element, dict[int, int]]:
    """(root, line of each element by id). ElementTree's own parser does not tell lines, expat does."""
    parser, stack, line = expat.ParserCreate(), [ElementTree.Element("")], {}

    def start(tag: str, attributes: dict[str, str]) -> None:
        stack.append(ElementTree.SubElement(stack[-1], tag, attributes))
        line[id(stack[-1])] = parser.CurrentLineNumber

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: stack.pop()
    try:
        parser.Parse(text, True)
    except expat.ExpatError as e:
        lines = text.splitlines() or [""]
        shown = lines[min(e.lineno, len(lines)) - 1]
        raise bad(SOURCE, e.lineno, shown, f"well-formed XML ({expat.ErrorString(e.code)})") from e
    return stack[0][0], line
