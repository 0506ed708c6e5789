"""How a rank's environment says what its limit of memory is."""

LIMIT, FOLDER = "CARME_MEMORY_PER_RANK", "CARME_SPILL"
