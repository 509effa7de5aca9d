"""The processes of several ranks: rank 0 serves, and starts and watches the others.

``Leader`` lives in the process of the engine.  It spawns one process for each other rank
(``follower``), sends them what the core tells its own worker, and ends the engine when one of them
ends.  Between them go msgspec messages over a Unix socket a rank, which needs no port and no file,
blocks without spinning, and tells either side when the other has ended.
"""
