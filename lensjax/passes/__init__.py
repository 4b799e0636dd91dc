"""Passes: a plan applied to a program, program to program, each keeping the numbers."""
