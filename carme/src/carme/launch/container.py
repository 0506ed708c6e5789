"""The job's container: the image that it really is, and Apptainer's command line."""

import os
import socket
import stat
import time
from typing import Any

from carme.launch.exits import Exit, LaunchError
from carme.launch.images import local_copy
from carme.launch.preparation import home
from carme.launch.programs import places
from carme.launch.spec import JobSpec

BEGAN = time.time()  # the allocation's own preparations are over
CONTROL_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
#: What a job with data finds it by.
DATA_VARIABLES = ("CARME_DATA", "CARME_RESULTS", "CARME_BEEOND")
#: Where the node's exporter hears how training goes (carme_runtime.progress), where there is one.
TRAINING = "/run/carme/training"


def forwarded(folder: str, spec: JobSpec) -> dict[str, str]:
    """The environment for apptainer, which carries Slurm's and the job's variables on into the container."""
    inside = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SLURM_", "SLURMD_", "CUDA_", "NVIDIA_", "ROCR_", "GPU_DEVICE_"))
        or name in ("USER", "LOGNAME", *DATA_VARIABLES)
    }
    inside |= {"LANG": "C.UTF-8", "CARME_STEP_PROLOG": str(BEGAN), **variables(folder, spec)}
    return os.environ | {f"APPTAINERENV_{name}": value for name, value in inside.items()}


def variables(folder: str, spec: JobSpec) -> dict[str, str]:
    """What each job has in its environment: where its files are, its metrics go and its errors are explained.

    Args:
        folder: The job's.
        spec: The job's.
    """
    help = {"CARME_HELP": spec.help} if spec.help else {}
    return {"CARME_JOB_FOLDER": folder, **metrics(), **help}


def metrics() -> dict[str, str]:
    """The variable with the socket for the progress of training, where there is one."""
    return {"CARME_METRICS": f"{TRAINING}/socket"} if os.path.isdir(TRAINING) else {}


def container(spec: JobSpec, staged: Any = None) -> list[str]:
    """The beginning of the command line that runs something in the job's container on this node.

    Args:
        spec: The job's.
        staged: What was brought here for it.
    """
    image = spec.image
    assert image is not None
    if not os.path.isfile(image):
        raise LaunchError(
            Exit.IMAGE_MISSING,
            f"The image file {image} is missing on {socket.gethostname()}.",
            "Choose another image, or ask an administrator to build or distribute it.",
        )
    if not any(os.access(place, os.X_OK) for place in places("apptainer", os.environ)):
        raise LaunchError(
            Exit.NO_APPTAINER,
            f"Apptainer is not installed on {socket.gethostname()}.",
            "Tell an administrator, or start the job without an image.",
        )
    file = checked_copy(image, spec.digest, own_place(spec)) if spec.own_image else local_copy(image)
    arguments = ["apptainer", "-q", "exec", "--contain", "--cleanenv", "--home", home()]
    # The folder and not the socket, which is another one after the exporter's restart.
    # With --contain its /dev/shm is its own. Apptainer takes no other, and would say so in every job's log.
    binds = [
        "/tmp",
        *([TRAINING] if metrics() else []),
        *(path for path in spec.binds if os.path.exists(path)),
    ]
    if spec.gpus:
        if has_driver():
            arguments.append("--nv")
        else:
            binds += devices("/dev")
    for path in [*binds, *(staged.binds if staged else ())]:
        arguments += ["--bind", f"{path}:{path}"]
    for path, inside in staged.read_only if staged else ():
        arguments += ["--bind", f"{path}:{inside}:ro"]
    return [*arguments, "--pwd", spec.workdir or home(), file]


def own_place(spec: JobSpec) -> str:
    """Where a job keeps its copy of a user's image: on the node's disk, else in its own folder in /tmp.

    Nobody but the job's owner can enter either.
    """
    job_id = os.environ.get("SLURM_JOB_ID", "")
    folder = f"{spec.staging.cache}/jobs/{job_id}" if spec.staging.cache else ""
    if not (folder and os.access(folder, os.W_OK | os.X_OK)):
        folder = f"/tmp/carme-{job_id}"
    return f"{folder}/image.sif"


def checked_copy(image: str, digest: str, copy: str) -> str:
    """The job's own copy of an image that is what was built; refuses any other.

    The site's images are root's, but a user's own one may change: who can write to it could do so between
    its check and its start. So the copy is checked, which only the job's owner can change.

    Args:
        image: The file.
        digest: What it must be.
        copy: Where the copy goes.
    """
    import hashlib

    changed = "Ask its owner to put it where you may read it, or choose another image."
    hashed, draft = hashlib.sha256(), f"{copy}.{os.getpid()}"
    try:
        # O_NONBLOCK: opening a FIFO in its place must not wait for its writer.
        with open(os.open(image, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(0, "it is not a plain file")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            changed = "Free some space on the node, or choose another image."
            with open(os.open(draft, flags, 0o400), "wb") as target:
                while part := file.read(4 << 20):
                    hashed.update(part)
                    target.write(part)
    except OSError as error:
        unlink(draft)
        raise LaunchError(
            Exit.IMAGE_CHANGED,
            f"The image file {image} cannot be copied on {socket.gethostname()}: {error.strerror}.",
            changed,
        ) from None
    found = f"sha256:{hashed.hexdigest()}"
    if found != digest:
        unlink(draft)
        raise LaunchError(
            Exit.IMAGE_CHANGED,
            f"The image file {image} is not what was built: its digest is {found}, not {digest}.",
            "Build the image again, or choose another one.",
        )
    os.replace(draft, copy)
    return copy


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # it was never made


def has_driver() -> bool:
    """Whether the libraries of NVIDIA's driver are installed here."""
    import ctypes  # asking the linker's cache for them would start a program

    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def devices(folder: str) -> list[str]:
    """The GPU devices in `folder` that the job was allotted on this node, and those that all of them need."""
    allotted = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS") or ""
    numbers = [number for number in allotted.split(",") if number.isdecimal()]
    names = [*(f"nvidia{number}" for number in numbers), *CONTROL_DEVICES] if numbers else []
    return [path for name in names if os.path.exists(path := f"{folder}/{name}")]
