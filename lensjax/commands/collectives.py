"""`lensjax collectives TABLE.csv`: predicts every row of a table of measured collectives."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from lensjax._errors import ClusterError, LensjaxError
from lensjax.commands import Result

HELP = "predict each row of a table of measured collectives"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", help="CSV: system, intra/inter, op, n_gpus, bytes, algbw_GBps, busbw_GBps, notes")
    parser.add_argument(
        "--cluster", help="price every row on this machine instead of the one its system text describes"
    )
    parser.add_argument(
        "--leave-out",
        choices=("series", "system"),
        help="predict each row by a fit to the table's other series or systems, not by lensjax's constants",
    )


def run(args: argparse.Namespace) -> Result:
    from lensjax.topology.collectives_table import read_table

    rows = read_table(args.table)
    predicted, problems = _predict(rows, args.cluster, args.leave_out)
    data = [_row(row, seconds, problems.get(row.line)) for row, seconds in zip(rows, predicted)]
    summary = summarise(rows, predicted)
    return Result({"rows": data, "summary": summary}, (_table(summary), _line(summary), *_unknown(problems)))


def _predict(rows: list, cluster: str | None, leave_out: str | None) -> tuple[np.ndarray, dict[int, str]]:
    """Seconds of each row (NaN where it cannot be said) and why, by line."""
    from lensjax.topology.calibrate import left_out, predict, shipped
    from lensjax.topology.cluster import Cluster
    from lensjax.topology.collectives_table import price_on

    seconds, problems = np.full(len(rows), np.nan), {}
    known = []
    machine = Cluster.parse(cluster) if cluster else None
    for i, row in enumerate(rows):
        try:
            if machine is not None:
                seconds[i] = price_on(machine, row)
            else:
                seconds[i] = predict(shipped(), [row])[0]
            known.append(i)
        except LensjaxError as e:
            problems[row.line] = e.message
    if leave_out and machine is not None:
        raise ClusterError("--leave-out fits to the table's own machines", hint="leave out --cluster")
    if leave_out:
        key = (lambda r: r.series) if leave_out == "series" else (lambda r: r.system)
        seconds[known] = left_out([rows[i] for i in known], key)
    return seconds, problems


def _row(row: Any, seconds: float, problem: str | None) -> dict[str, Any]:
    from lensjax.topology.collectives_table import bus_factor

    rate = row.priced_bytes / seconds if seconds > 0 else float("nan")
    result = {
        "id": row.line,
        "op": row.op,
        "devices": row.devices,
        "bytes": row.bytes,
        "predicted_s": seconds if row.bytes is not None else None,
        "measured_s": row.seconds,
        "predicted_rate": rate,
        "measured_rate": row.rate,
        "predicted_busbw": rate * bus_factor(row.op, row.devices),
    }
    return result if problem is None else {**result, "problem": problem}


def summarise(rows: list, predicted: np.ndarray) -> dict[str, Any]:
    """Relative errors of time: over all rows that state one, per operation and tier, and of the large-message rates."""
    measured = np.array([r.seconds if r.seconds else np.nan for r in rows])
    errors = np.abs(predicted / measured - 1)
    rates = np.array([r.priced_bytes / r.rate if r.rate and r.bytes is None else np.nan for r in rows])
    groups: dict[tuple[str, str], list[float]] = {}
    for row, error in zip(rows, errors):
        groups.setdefault((row.op, row.scope), []).append(error)
    return {
        **_spread(errors),
        "without_size": _spread(np.abs(predicted / rates - 1)),
        "groups": [{"op": op, "tier": tier, **_spread(np.array(e))} for (op, tier), e in sorted(groups.items())],
    }


def _spread(errors: np.ndarray) -> dict[str, Any]:
    errors = errors[np.isfinite(errors)]
    if not len(errors):
        return {"rows": 0, "median": None, "p90": None, "worst": None}
    p90 = float(np.quantile(errors, 0.9))
    return {"rows": len(errors), "median": float(np.median(errors)), "p90": p90, "worst": float(errors.max())}


def _table(summary: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title="Error of predicted time")
    for name in ("operation", "tier"):
        table.add_column(name)
    for name in ("rows", "median", "90th percentile", "worst"):
        table.add_column(name, justify="right")
    for group in [
        *summary["groups"],
        {"op": "all", "tier": "", **{k: summary[k] for k in ("rows", "median", "p90", "worst")}},
    ]:
        if group["rows"]:
            shown = [f"{group[k]:.1%}" for k in ("median", "p90", "worst")]
            table.add_row(group["op"], group["tier"], str(group["rows"]), *shown)
    return table


def _line(summary: dict[str, Any]) -> str:
    rates = summary["without_size"]
    if not rates["rows"]:
        return "Relative error |predicted / measured - 1|."
    median, worst = f"{rates['median']:.1%}", f"{rates['worst']:.1%}"
    return (
        f"{rates['rows']} rows state a rate but no size: taken as large messages, median error {median}, worst {worst}"
    )


def _unknown(problems: dict[int, str]) -> list[str]:
    return [f"line {line}: {why}" for line, why in problems.items()]
