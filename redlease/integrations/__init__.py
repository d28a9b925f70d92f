"""Thin layers for frameworks, each in a module that is named after the framework and imports it."""
