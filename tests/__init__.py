"""Tests; a package so that they can share the model zoo (`from tests.zoo import FAMILIES`)."""
