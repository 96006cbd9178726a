"""Parts of a host tier, which is not built: nothing in the server uses this folder yet.

``topology`` says which NUMA nodes there are, ``limits`` whether there is room, ``numa`` puts memory on a
node and looks where it lies, ``host_memory`` allocates and registers it.  Everything that is read from
``/sys`` and ``/proc`` is read below a ``root``, so that a machine can be described that is not there.
"""
