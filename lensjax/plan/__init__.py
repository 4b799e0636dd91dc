"""What to do, as data: plans, the preset grammar, pins."""
