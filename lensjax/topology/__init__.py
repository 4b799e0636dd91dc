"""What the hardware is: clusters as data, the catalogue, discovery, device order, and the price of collectives."""
