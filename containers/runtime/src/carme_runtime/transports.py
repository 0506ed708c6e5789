"""What may carry the data of `carme_runtime` between ranks."""

NATIVE = "native"  # shared memory within a node, TCP between nodes
GPI2 = "gpi2"  # the GPI-2 that a site has installed
TRANSPORTS = (NATIVE, GPI2)
TRANSPORT = "CARME_TRANSPORT"
# The backend of torch.distributed that scripts get, whichever they name.
TORCH_BACKEND = "CARME_TORCH_BACKEND"
TORCH_BACKENDS = ("carme", "gloo", "nccl")
