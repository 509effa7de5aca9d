"""An artifact keeps what a build made: a folder of files, named by its key, with a manifest.

Stores hold such folders, and archives move them.  Only ``run`` knows what the files mean.
"""
