"""`python -m carme_spawner.singleuser`."""

from carme_spawner.singleuser import main

main()
