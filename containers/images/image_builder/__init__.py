"""Builds the job containers; `build` beside this package is its command."""
