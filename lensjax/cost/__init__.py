"""What a partitioned program takes on a cluster: compute, communication, overlap and memory, from data alone."""

from lensjax.cost.memory import Memory, memory
from lensjax.cost.score import Cost, cost, score

__all__ = ["Cost", "Memory", "cost", "memory", "score"]
