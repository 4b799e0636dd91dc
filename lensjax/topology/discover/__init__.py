"""Finding out what the machine is: from JAX's devices, and from the texts that drivers, libraries and schedulers
print.

Every parser takes text and returns data, so it needs no hardware. What a text does not say is taken from the
catalogue and noted in `Cluster.notes`; a text that is malformed or cut off is an error that names the line, never a
guessed machine.
"""
