"""The processes of several ranks: rank 0 serves, and feeds and watches the others.

``Leader`` lives in the process of the engine.  This process starts the others (``spawn``), or Ray
(``ray``) or torchrun does; each is a ``follower``.  ``Leader`` sends them what the core tells its
own worker, and ends the engine when one of them ends.  Between them go msgspec messages over a
stream a rank, which blocks without spinning and tells either side when the other has ended: a Unix
socket, which needs no port, and a TCP connection where Ray may have put the rank on another host.
"""
