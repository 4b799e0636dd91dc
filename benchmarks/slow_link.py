"""Gradients over a real slow link: ours (flat, hierarchical, each codec) beside PyTorch DDP, interleaved in one run.

    python benchmarks/slow_link.py --rate 100mbit [--rate 50mbit ...] [--rounds 4] [--steps 2] [--json F] [--png F]

Two network namespaces on this machine, joined by a veth pair whose rate `tc tbf` limits each way; one JAX process in
each with four emulated devices and gloo between them, and one PyTorch process in each. All methods train the same
decoder from the same start on the same batches, in turns. Needs root, Linux and iproute2; PyTorch (a CPU build, the
extra `bench`) in this Python or in the one that `--torch-python` names, else its rows are left out with the reason.

    step_s       median of a step, seconds
    reduction_s  that, less the median of a step that leaves the slow link out (of the same framework)
    predicted_s  bytes that our plan has a host send over the link's rate, and the coding: what the gate reckons with
    coding_s     median of a step that codes but leaves the slow link out, less that of one that does not code
    wire_bytes   bytes that a host puts on the link per step, as the interface counts them, the larger of both hosts
    planned_bytes  those that our plan has it send
    loss         mean of the last turn, after the same number of steps
    loss_at_time the same after equal time: that of the fastest method's whole run, at each method's own step time
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.topology import netns  # noqa: E402

TAG = "ljs"
COLOURS = {"compute": "#b8c4ce", "ours": "#2b6cb0", "torch": "#c05621"}


class Pair:
    """The two processes of one framework, one a host, that take turns when they are told to."""

    def __init__(self, names: list[str], python: str, script: str, port: int):
        address = f"{netns.ADDRESS}.1:{port}"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.logs = [open(f"/tmp/slow_link_{script}_{i}.log", "w+") for i in (0, 1)]
        self.runs = []
        for i, name in enumerate(names):
            inside = ["sh", "-c", 'hostname "$0" && exec "$@"', name, python, str(ROOT / "benchmarks" / script), str(i)]
            self.runs.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, "unshare", "--uts", *inside, address], env=env, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.logs[i],
                )
            )  # fmt: skip
        self.methods = self._answer(0)["ready"]
        self._answer(1)

    def turn(self, method: str, start: int, steps: int) -> dict[str, Any]:
        for run in self.runs:
            run.stdin.write(json.dumps({"method": method, "start": start, "steps": steps}) + "\n")
            run.stdin.flush()
        a, b = self._answer(0), self._answer(1)
        return {
            "seconds": [max(x, y) for x, y in zip(a["seconds"], b["seconds"])],
            "losses": [(x + y) / 2 for x, y in zip(a["losses"], b["losses"])],
            "bytes": max(a["bytes"], b["bytes"]) / steps,
        }

    def _answer(self, i: int) -> dict[str, Any]:
        for line in self.runs[i].stdout:
            if line.startswith("{"):
                return json.loads(line)
        self.logs[i].seek(0)
        raise SystemExit(f"host {i} ended:\n{self.logs[i].read()[-3000:]}")

    def stop(self) -> None:
        for run in self.runs:
            run.kill()
            run.wait()
        for log in self.logs:
            log.close()
            Path(log.name).unlink(missing_ok=True)


def set_rate(names: list[str], rate: str) -> None:
    for name, link in zip(names, (f"{TAG}a", f"{TAG}b")):
        command = f"ip netns exec {name} tc qdisc change dev {link} root tbf rate {rate} burst 256kb latency 100ms"
        subprocess.run(command.split(), check=True)


def bytes_per_second(rate: str) -> float:
    """Of a rate in tc's notation: "100mbit"."""
    found = re.fullmatch(r"([0-9.]+)([kmg]?)bit", rate)
    if found is None:
        raise SystemExit(f"--rate {rate}: bits per second, as in 100mbit")
    return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8


def measure(pairs: list[Pair], rates: list[str], names: list[str], rounds: int, steps: int, say) -> list[dict]:
    """A row for each rate and method. Training goes on from rate to rate; the first turn of all (it compiles) does not
    count in times or bytes."""
    methods = [(pair, m) for pair in pairs for m in pair.methods]
    done = dict.fromkeys([m for _, m in methods], 0)
    planned = {m: sent for pair in pairs for m, sent in pair.methods.items()}
    losses: dict[str, list[float]] = {m: [] for m in done}
    for pair, m in methods:
        say(f"compiling {m}")
        losses[m] += pair.turn(m, 0, 2)["losses"]
        done[m] = 2
    rows = []
    for rate in rates:
        set_rate(names, rate)
        seconds: dict[str, list[float]] = {m: [] for m in done}
        sent: dict[str, list[float]] = {m: [] for m in done}
        for r in range(rounds):
            for pair, m in methods if r % 2 == 0 else methods[::-1]:
                say(f"{rate}, round {r + 1} of {rounds}: {m}")
                result = pair.turn(m, done[m], steps)
                done[m] += steps
                seconds[m] += result["seconds"]
                sent[m].append(result["bytes"])
                losses[m] += result["losses"]
        step_s = {m: statistics.median(v) for m, v in seconds.items()}
        linked = [m for m in done if "local" not in m]
        shortest = min(step_s[m] for m in linked) * rounds * steps
        for m in linked:
            base = step_s["torch-local" if m.startswith("torch") else "local"]
            coding = step_s.get(f"local-{m}", base) - base
            until = len(losses[m]) - rounds * steps + max(1, int(shortest / step_s[m]))
            rows.append(
                {
                    "rate": rate,
                    "method": m,
                    "step_s": step_s[m],
                    "reduction_s": step_s[m] - base,
                    "coding_s": coding,
                    "predicted_s": None if planned[m] is None else planned[m] / bytes_per_second(rate) + coding,
                    "planned_bytes": planned[m],
                    "wire_bytes": round(statistics.median(sent[m])),
                    "loss": statistics.mean(losses[m][-steps:]),
                    "loss_at_time": statistics.mean(losses[m][max(0, until - steps) : until]),
                    "steps": done[m],
                }
            )
    return rows


def table(rows: list[dict]) -> str:
    head = f"{'rate':>9} {'method':<19} {'step':>9} {'reduction':>10} {'predicted':>10} {'x flat':>7} {'MB/step':>8} "
    head += f"{'planned':>8} {'loss':>7} {'at time':>8}"
    lines = [head, "-" * len(head)]
    for row in rows:
        flat = next(r for r in rows if r["rate"] == row["rate"] and r["method"] == "flat")
        gain = f"{flat['reduction_s'] / row['reduction_s']:7.2f}" if row["reduction_s"] > 0 else "      -"
        lines.append(
            f"{row['rate']:>9} {row['method']:<19} {_ms(row['step_s']):>9} {_ms(row['reduction_s']):>10} "
            f"{_ms(row['predicted_s']):>10} {gain} {_mb(row['wire_bytes']):>8} {_mb(row['planned_bytes']):>8} "
            f"{row['loss']:>7.3f} {row['loss_at_time']:>8.3f}"
        )
    return "\n".join(lines)


def page(rows: list[dict], command: str, pictured: str) -> str:
    """docs/slow_link.md: what was measured, by which command, in the words that the figures bear."""
    rates = list(dict.fromkeys(r["rate"] for r in rows))
    out = [
        "# A slow link between two hosts",
        "",
        f"`{command}` wrote this page and its picture: two network namespaces on a machine of {os.cpu_count()} cores, "
        "joined by a pair of interfaces whose rate is limited each way; in each four emulated devices of JAX with gloo "
        "between them, and one process of PyTorch. All methods train the same decoder (9.5 MiB of float32 gradient on "
        "each device) from the same start on the same batches, in turns.",
        "",
        "- **reduction**: the median step, less the median step of the same framework without the link;",
        "- **predicted**: the bytes that the plan has a host send over the rate of the link, and the coding (a step "
        "that codes without the link, less one that does not code);",
        "- **MB**: bytes that a host put on the link per step, counted by the interface, and planned;",
        "- **loss** after equal steps, and after the time that the fastest method took for all of its own.",
        "",
        f"![Step time and bytes on the link, by method]({pictured})",
    ]
    for rate in rates:
        mine = [r for r in rows if r["rate"] == rate]
        flat = next(r for r in mine if r["method"] == "flat")
        out += ["", f"## {rate}", ""]
        out += ["| method | step | reduction | predicted | x flat | MB | planned | loss | at equal time |"]
        out += ["|---|---|---|---|---|---|---|---|---|"]
        for r in mine:
            gain = f"{flat['reduction_s'] / r['reduction_s']:.1f}" if r["reduction_s"] > 0 else "-"
            cells = [r["method"], *map(_ms, (r["step_s"], r["reduction_s"], r["predicted_s"])), gain]
            cells += [_mb(r["wire_bytes"]), _mb(r["planned_bytes"]), f"{r['loss']:.3f}", f"{r['loss_at_time']:.3f}"]
            out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _mb(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e6:.2f}"


def picture(rows: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = list(dict.fromkeys(r["rate"] for r in rows))
    fig, grid = plt.subplots(len(rates), 2, figsize=(10, 1 + 2.6 * len(rates)), squeeze=False, layout="constrained")
    for line, rate in zip(grid, rates):
        mine = [r for r in rows if r["rate"] == rate]
        names, at = [r["method"] for r in mine], range(len(mine))
        tint = [COLOURS["torch" if n.startswith("torch") else "ours"] for n in names]
        base = [max(0.0, r["step_s"] - max(0.0, r["reduction_s"])) * 1e3 for r in mine]
        line[0].barh(at, base, color=COLOURS["compute"], label="step without the slow link")
        line[0].barh(at, [max(0.0, r["reduction_s"]) * 1e3 for r in mine], left=base, color=tint)
        line[0].set_xlabel(f"milliseconds a step at {rate}")
        line[1].barh(at, [r["wire_bytes"] / 1e6 for r in mine], color=tint)
        line[1].set_xlabel("megabytes a host sends per step")
        for axes in line:
            axes.set_yticks(list(at), names)
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
        for i, r in enumerate(mine):
            line[1].text(r["wire_bytes"] / 1e6, i, f" {r['wire_bytes'] / 1e6:.1f}", va="center", fontsize=8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in COLOURS.values()]
    labels = ["without the slow link", "lensjax: on the link", "PyTorch DDP: on the link"]
    fig.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    fig.savefig(path, dpi=110)


def has_torch(python: str) -> str:
    """Why PyTorch's rows cannot be measured; empty when they can."""
    code = "import torch.distributed as d; raise SystemExit(not d.is_gloo_available())"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return "" if found.returncode == 0 else (found.stderr.strip().splitlines() or ["this PyTorch has no gloo"])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", action="append", help="of the link, tc notation; may be repeated (default 100mbit)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2, help="of each method in each round")
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has PyTorch")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--png", metavar="FILE")
    parser.add_argument("--page", action="store_true", help="write docs/slow_link.md and its picture")
    args = parser.parse_args()
    rates = args.rate or ["100mbit"]
    for rate in rates:
        bytes_per_second(rate)
    if reason := netns.missing():
        raise SystemExit(f"no slow link can be made here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    say = lambda text: print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)
    without = has_torch(args.torch_python)
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(netns.slow_link("1gbit", TAG))
        pairs = [Pair(names, sys.executable, "slow_link_jax.py", 31873)]
        stack.callback(pairs[0].stop)
        if not without:
            pairs.append(Pair(names, args.torch_python, "slow_link_torch.py", 31874))
            stack.callback(pairs[1].stop)
        rows = measure(pairs, rates, names, args.rounds, args.steps, say)
    say("")
    skipped = {"torch": without} if without else {}
    if args.json:
        Path(args.json).write_text(json.dumps({"schema": 1, "rows": rows, "skipped": skipped}, indent=1) + "\n")
    if args.png:
        picture(rows, args.png)
    if args.page:
        picture(rows, str(ROOT / "docs" / "slow_link.png"))
        given = " ".join(f"--rate {rate}" for rate in rates)
        command = f"python benchmarks/slow_link.py --page {given} --rounds {args.rounds} --steps {args.steps}"
        (ROOT / "docs" / "slow_link.md").write_text(page(rows, command, "slow_link.png"), encoding="utf-8")
    print("\n" + table(rows) + (f"\nPyTorch left out: {without}" if without else ""))


if __name__ == "__main__":
    main()
