#!python
# The command `carme` where carme.c is not compiled: `#!python` becomes the environment's Python.
from carme.cli import program

program()
