"""What a build leaves behind: its key, the folder of files with their manifest, stores of such
folders.  What the files mean is known to ``run`` alone."""
