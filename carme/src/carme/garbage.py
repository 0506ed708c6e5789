"""How often Python looks for objects that only refer to each other, in daemons that hold a large site."""

import gc

__all__ = ["collect_rarely"]

#: New objects until the youngest are looked through, and how often that is done until older ones are. A
#: snapshot of 5,000 nodes has 30,000 objects, and a page's form, which is a cycle, may hold one: so snapshots
#: that are over must not wait for long.
THRESHOLDS = 10_000, 10, 10


def collect_rarely() -> None:
    """Never look through what this process has loaded, and rarely through what it holds.

    Nothing runs while Python looks through all objects. By default it does so after each snapshot of a large
    site, which takes 0.1 to 0.2 s with the portal's modules and 5,000 nodes. To be called once all is there
    that stays: modules, and what a daemon makes of them and of its state.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
