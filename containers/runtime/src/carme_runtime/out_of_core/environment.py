"""Names of the variables that say to a rank how much memory it may take, and how it does with that."""

LIMIT, FOLDER = "CARME_MEMORY_PER_RANK", "CARME_SPILL"
RECOMPUTE = "CARME_RECOMPUTE"
