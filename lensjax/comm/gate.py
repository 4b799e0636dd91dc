"""When compression pays: only when it takes away time that the step waits for the slow link.

T(codec) = 2(K-1) latency + bytes / bandwidth is what one reduction takes on the slow tier; what is longer than the
backward pass that it can hide behind is exposed. Coding costs about 12 bytes of memory traffic for each value and hop.
A codec is chosen when it removes more exposed time than twice its own cost plus 2 % of the step: Agarwal et al.
(arXiv:2103.00543) found that compression rarely pays on fast networks, so the burden of proof is on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lensjax.comm.codec import Codec
from lensjax.comm.group import Group
from lensjax.comm.registry import parse_codec as parse

CODING_BYTES = 12  # memory traffic per value and hop: read float32, write codes, and back
LEAST_GAIN = 0.02  # of the step


@dataclasses.dataclass(frozen=True)
class Choice:
    """The codec that pays ("off" where none beats bfloat16), why, and each one's seconds: on the link, and exposed."""

    codec: str
    reason: str
    link_s: dict[str, float]
    exposed_s: dict[str, float]


def link_seconds(codec: str | Codec, values: int, members: int, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds that a reduction of `values` numbers per device takes on a slow tier of `members` replicas.

    `bandwidth`: bytes/s of one device on it; `latency`: seconds a hop.
    """
    if members == 1:
        return 0.0
    sent = parse(codec).wire_bytes([(values,)], Group((("slow", members),)))
    return 2 * (members - 1) * latency + sent / bandwidth


def choose(
    values: int, members: int, *, bandwidth: float, backward_s: float, step_s: float, latency: float = 0.0,
    memory_bandwidth: float = 2e12, candidates: Sequence[str] = ("int8", "int4"),
) -> Choice:  # fmt: skip
    """Whether a codec beats bfloat16 for a gradient of `values` numbers per device between `members` replicas.

    bandwidth:        bytes/s of one device on the slow tier
    backward_s:       seconds of backward pass that the reduction can hide behind (one micro-batch's)
    step_s:           seconds of the step without the reduction
    memory_bandwidth: bytes/s of the device's memory
    The first candidate (mildest first) that leaves no more exposed than a harsher one, within 2 % of the step, wins.
    """
    coding = 2 * CODING_BYTES * values / memory_bandwidth
    link = {c: link_seconds(c, values, members, bandwidth, latency) for c in ("bf16", *candidates)}
    exposed = {c: max(0.0, t - backward_s) for c, t in link.items()}
    least = LEAST_GAIN * step_s
    best = "bf16"
    for c in candidates:
        cost = 2 * coding if best == "bf16" else 0.0
        if exposed[best] - exposed[c] > cost + least:
            best = c
    ms = lambda s: f"{s * 1e3:.1f} ms"
    if best == "bf16":
        best = "off"
        why = f"bf16 leaves {ms(exposed['bf16'])} of {ms(link['bf16'])} exposed: " + (
            "nothing to gain" if not exposed["bf16"] else f"no codec saves {ms(2 * coding + least)} of it"
        )
    else:
        why = f"bf16 exposes {ms(exposed['bf16'])} of the link, {best} {ms(exposed[best])} ({ms(coding)} of coding)"
    return Choice(best, why, link, exposed)
