"""The host tier: a KV pool in host memory, with hot tiles, open pages and staged prefills on the GPU.

``topology`` says which NUMA nodes there are, ``limits`` whether there is room, ``numa`` puts memory on a
node and looks where it lies, ``host_memory`` allocates and registers it.  Everything that is read from
``/sys`` and ``/proc`` is read below a ``root``, so that a machine can be described that is not there.
"""
