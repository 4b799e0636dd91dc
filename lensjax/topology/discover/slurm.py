"""SLURM: the job's hosts from its environment, and their switches or blocks from topology.conf.

Formats: `man sbatch` (SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE, ...) and `man topology.conf` (SwitchName=... for the
tree plugin, BlockName=... for the block plugin).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lensjax._errors import ClusterError
from lensjax.topology import catalogue
from lensjax.topology.cluster import Cluster
from lensjax.topology.discover.hosts import Host, cluster_of_hosts
from lensjax.topology.discover.text import bad, clean

ENVIRONMENT = "SLURM environment"
SOURCE = "topology.conf"
MOST_HOSTS = 2**20
_REPEAT = re.compile(r"^([0-9]{1,6})(?:\(x([0-9]{1,6})\))?$")
_NODES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE")


def expand(text: str, source: str = ENVIRONMENT, line: int = 1) -> list[str]:
    """Host names of a host list: "node[001-003,7],login" -> node001 node002 node003 node7 login. Raises
    ClusterError.
    """
    result: list[str] = []
    for part in _split(text, source, line):
        names = [""]
        for literal, inside in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            choices = [literal] if literal else _numbers(inside, text, source, line)
            if len(names) * len(choices) > MOST_HOSTS:
                raise bad(source, line, text, f"at most {MOST_HOSTS:,} hosts")
            names = [n + c for n in names for c in choices]
        result += names
    if not result or "" in result or any(" " in name for name in result):
        raise bad(source, line, text, "a host list such as node[01-04],login1")
    return result


def _split(text: str, source: str, line: int) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if depth not in (0, 1):
            raise bad(source, line, text, "brackets that match")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth:
        raise bad(source, line, text, "a closing bracket")
    return [p.strip() for p in [*parts, text[start:]]]


def _numbers(inside: str, text: str, source: str, line: int) -> list[str]:
    result = []
    for item in inside.split(","):
        match = re.match(r"^([0-9]{1,18})(?:-([0-9]{1,18}))?$", item.strip())
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(high) < int(low) or int(high) - int(low) >= MOST_HOSTS:
            raise bad(source, line, text, f"ranges such as [01-04,7], of at most {MOST_HOSTS:,}")
        result += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return result


def parse_environment(environment: Mapping[str, str]) -> list[tuple[str, int]]:
    """(host, GPUs) in rank order. Raises ClusterError when the job's variables are missing or disagree."""
    nodes = next((environment[k] for k in _NODES if k in environment), None)
    if nodes is None:
        raise ClusterError(f"{ENVIRONMENT}: no {_NODES[0]}", hint="run inside a SLURM job (sbatch, srun or salloc)")
    hosts = expand(nodes)
    if len(set(hosts)) < len(hosts):
        raise bad(ENVIRONMENT, 1, nodes, "each host once")
    counts = _counts(environment, len(hosts))
    if len(counts) != len(hosts):
        raise ClusterError(f"{ENVIRONMENT}: {len(counts)} counts of tasks for {len(hosts)} hosts {nodes}")
    return list(zip(hosts, counts))


def _counts(environment: Mapping[str, str], hosts: int) -> list[int]:
    """GPUs of each host: given directly, or one per task."""
    for key in _GPUS:
        if key in environment:
            match = re.fullmatch(r"(?:[\w.-]+:)*([0-9]{1,6})", environment[key])  # "8", "h100:8"
            if not match or int(match[1]) < 1:
                raise ClusterError(
                    f"{ENVIRONMENT}: {key}={environment[key]!r}", hint="expected a number, or TYPE:NUMBER"
                )
            return [int(match[1])] * hosts
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if tasks is None:
        raise ClusterError(
            f"{ENVIRONMENT}: neither {' nor '.join(_GPUS)} nor SLURM_TASKS_PER_NODE", hint="pass --gpus-per-node"
        )
    result: list[int] = []
    for part in tasks.split(","):
        match = _REPEAT.match(part.strip())
        if not match:
            raise ClusterError(f"{ENVIRONMENT}: SLURM_TASKS_PER_NODE={tasks!r}", hint='expected e.g. "8(x4),7"')
        result += [int(match[1])] * int(match[2] or 1)
    if min(result) < 1:
        raise ClusterError(f"{ENVIRONMENT}: SLURM_TASKS_PER_NODE={tasks!r}: a host without tasks")
    return result


def parse_topology(text: str) -> dict[str, tuple[str, ...]]:
    """Host -> the switches (or block) it hangs under, outermost first. Raises ClusterError with the line."""
    nodes: dict[str, list[str]] = {}
    children: dict[str, tuple[int, list[str]]] = {}
    for number, line in _logical_lines(text):
        pairs = [_field(word, number, line) for word in line.split()]
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise bad(SOURCE, number, line, "each key once in a line")
        name = fields.get("switchname") or fields.get("blockname")
        if name is None:
            if "blocksizes" in fields:
                continue
            raise bad(SOURCE, number, line, "SwitchName=... or BlockName=...")
        if name in nodes or name in children:
            raise bad(SOURCE, number, line, f"one line for {name}")
        if "nodes" in fields:
            nodes[name] = expand(fields["nodes"], SOURCE, number)
        elif "switches" in fields:
            children[name] = (number, expand(fields["switches"], SOURCE, number))
        else:
            raise bad(SOURCE, number, line, "Nodes=... or Switches=...")
    if not nodes:
        raise ClusterError(f"{SOURCE}: no line with Nodes=", hint="e.g. SwitchName=leaf1 Nodes=node[01-16]")
    return _paths(nodes, children)


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """(number, text) without comments; a backslash at the end continues a line."""
    result, held, first = [], "", 0
    for number, line in enumerate(clean(text).splitlines(), 1):
        line = line.split("#")[0].rstrip()
        first = first or number
        held += line.removesuffix("\\")
        if line.endswith("\\"):
            held += " "
            continue
        if held.strip():
            result.append((first, held.strip()))
        held, first = "", 0
    if held.strip():
        raise bad(SOURCE, first, held, "another line after the backslash")
    return result


def _field(word: str, number: int, line: str) -> tuple[str, str]:
    key, equal, value = word.partition("=")
    if not equal or not value:
        raise bad(SOURCE, number, line, f"KEY=VALUE, found {word!r}")
    return key.lower(), value


def _paths(nodes: dict[str, list[str]], children: dict[str, tuple[int, list[str]]]) -> dict[str, tuple[str, ...]]:
    parent: dict[str, str] = {}
    for name, (number, below) in children.items():
        for child in below:
            if child not in nodes and child not in children:
                raise bad(SOURCE, number, f"{name} has {child}", "switches that have a line of their own")
            if child in parent:
                raise bad(
                    SOURCE, number, f"{name} and {parent[child]} both have {child}", "one switch above each switch"
                )
            parent[child] = name
    result: dict[str, tuple[str, ...]] = {}
    for leaf, hosts in nodes.items():
        path = [leaf]
        while path[0] in parent:
            if parent[path[0]] in path:
                raise bad(
                    SOURCE, children[parent[path[0]]][0], f"{path[0]} under {parent[path[0]]}", "no switch above itself"
                )
            path.insert(0, parent[path[0]])
        for host in hosts:
            if host in result:
                raise ClusterError(f"{SOURCE}: host {host} is under {result[host][-1]} and under {leaf}")
            result[host] = tuple(path)
    depth = max(map(len, result.values()))
    return {h: (*p[:1] * (depth - len(p)), *p) for h, p in result.items()}


def discover(environment: Mapping[str, str], machine: str, topology: str | None = None) -> Cluster:
    """The cluster of a SLURM job on a catalogue machine; `topology` is the text of topology.conf."""
    found = parse_environment(environment)
    paths = parse_topology(topology) if topology is not None else {}
    lost = [h for h, _ in found if topology is not None and h not in paths]
    if lost:
        raise ClusterError(f"{SOURCE} does not name host {lost[0]} of the job", hint="is it another cluster's file?")
    hosts = [Host(h, n, paths.get(h, ())) for h, n in found]
    notes = () if topology is not None else ("no topology.conf: all hosts taken as equally near",)
    if not any(key in environment for key in _GPUS[:2]):
        notes += (f"no {_GPUS[0]}: one GPU for each task",)
    depth = len(hosts[0].path)
    levels = ["spine", "leaf"][-depth:] if depth in (1, 2) else [f"switch{depth - i}" for i in range(depth)]
    return cluster_of_hosts(hosts, catalogue.machine(machine), "slurm", levels, notes)
