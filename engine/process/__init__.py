"""The engine in a process of its own, and the client that speaks with it.

``child`` runs core and worker; ``client`` starts it and gives coroutines the outputs of their
requests.  Between them go msgspec messages over two ``ipc://`` sockets in a private folder: one for
each request or abort, and one a step back.  A ``Heartbeat`` in shared memory says whether steps go
on.  Nothing of the other rooms imports this one.
"""
