"""lensjax: a sharding compiler frontend for JAX."""
