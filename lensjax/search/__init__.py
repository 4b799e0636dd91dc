"""Choosing a plan: presets, space, solver."""
