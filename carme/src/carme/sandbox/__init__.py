"""A cluster without Slurm: jobs run as processes of this computer, of the one user who starts it.

`SandboxSlurm` implements the interface of the gateway (`carme.slurm.Slurm`), so the real broker runs over it.
Nodes and GPUs are pretended, and counted as Slurm counts them; memory and processors are not enforced. It is
for developers (`./dev`), for tests, and for everyone who wants to try Carme on a laptop. It does not separate
users from each other: run it only where nobody else can reach it.
"""

from carme.sandbox.accounts import SandboxAccount, accounts_in
from carme.sandbox.gateway import SandboxSlurm

__all__ = ["SandboxAccount", "SandboxSlurm", "accounts_in"]
