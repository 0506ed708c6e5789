"""GPI-2 as the transport: the library that a site has installed, loaded at run time.

Its one-sided operations, atomics and state are used as they are. What GPI-2 has no equal for (collectives of
any size and type, messages, passive messages up to 1 MiB) is made of its notified writes; its own collectives
check nothing and end at 255 elements.
"""
