"""What the hardware is: clusters as data, the catalogue, discovery, device order, and the price of collectives."""

from lensjax.topology.cluster import Cluster, Device, Other, Slow, Tier
from lensjax.topology.mesh import Placement, make_mesh, place, placement

__all__ = ["Cluster", "Device", "Other", "Placement", "Slow", "Tier", "make_mesh", "place", "placement"]
