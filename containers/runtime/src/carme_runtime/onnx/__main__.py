"""`python -m carme_runtime.onnx`."""

import sys

from carme_runtime.onnx.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
