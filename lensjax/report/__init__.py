"""Showing: tables, pictures, pages."""
