"""Names of the variables that say to a rank how much memory it may take, and where the rest goes."""

LIMIT, FOLDER = "CARME_MEMORY_PER_RANK", "CARME_SPILL"
