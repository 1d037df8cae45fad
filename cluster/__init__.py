"""Placement, lifecycle, configuration and the command line. The only package that imports ray."""
