"""Optimised HLO text as data."""

from lensjax.verify.hlo.module import Computation, Frame, Instruction, Module
from lensjax.verify.hlo.parse import NotHlo, parse_hlo
from lensjax.verify.hlo.shapes import Shape

__all__ = ["Computation", "Frame", "Instruction", "Module", "NotHlo", "Shape", "parse_hlo"]
